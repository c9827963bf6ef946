// ---------------------------------------------------------------- what a rank runs and holds

const FIRST_STEPS = 200;

const programOf = rank => {
  const sites = ranks.sitesOf[ranks.sites[rank]], member = ranks.groupsOf[ranks.groups[rank]];
  const mine = new Set(), steps = [];
  instructions.kind.forEach((kind, at) => {
    if (kind === 1 && member[instructions.at[at]] >= 0) mine.add(instructions.tag[at]);
  });
  instructions.kind.forEach((kind, at) => {
    const where = instructions.at[at];
    const concerns = kind === 1 ? member[where] >= 0
      : kind === 2 ? mine.has(instructions.tag[at]) && (where < 0 || sites.includes(where)) : sites.includes(where);
    if (concerns) steps.push(at);
  });
  return steps;
};
const stepLine = (rank, at) => {
  const kind = instructions.kind[at], tag = `#${instructions.tag[at]}`;
  if (kind === 0) {
    const segment = instructions.what[at], own = nodesOfSegment(segment);
    const details = make("details", {}, make("summary", {}, `Run ${segments.name[segment]}: ${plural(own.length, "node")}, ${time(segments.time[segment])}`));
    details.addEventListener("toggle", () => details.childElementCount === 1 && details.append(listed(own)), {once: true});
    return make("li", {class: "run"}, details);
  }
  if (kind === 1) {
    const group = instructions.groups[instructions.at[at]][ranks.groupsOf[ranks.groups[rank]][instructions.at[at]]] ?? [];
    const others = group.filter(other => other !== rank);
    return make("li", {class: "start"}, `${tag} Begin to ${told(at)}`, others.length ? make("span", {class: "note"}, ` with ${ranksText(others)}`) : null);
  }
  if (kind === 2) return make("li", {class: "wait"}, `Wait for ${tag}`);
  return make("li", {class: "store"}, "Copy a variable’s next value over it");
};
const rankCard = rank => {
  const held = ranks.holdings[ranks.holds[rank]], steps = programOf(rank), lines = [];
  for (let at = 0; at < held.length; at += 3) lines.push(held.slice(at, at + 3));
  const total = lines.reduce((sum, [, , size]) => sum + size, 0);
  const list = make("ol", {class: "steps"}, steps.slice(0, FIRST_STEPS).map(at => stepLine(rank, at)));
  const rest = steps.length > FIRST_STEPS ? make("button", {type: "button", class: "go", onclick: event => {
    list.append(...steps.slice(FIRST_STEPS).map(at => stepLine(rank, at)));
    event.target.remove();
  }}, `The other ${(steps.length - FIRST_STEPS).toLocaleString("en")} steps`) : null;
  const keeps = make("details", {}, make("summary", {}, `Keeps ${plural(lines.length, "variable")}, ${bytes(total)}`));
  keeps.addEventListener("toggle", () => keeps.childElementCount === 1 && keeps.append(make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, ["Variable", "Part", "Bytes"].map((name, at) => make("th", {scope: "col", class: at === 2 ? "number" : null}, name)))),
    make("tbody", {}, lines.map(([variable, box, size]) => make("tr", {}, make("td", {}, link(variable)), make("td", {}, ranks.boxes[box] || "whole"), make("td", {class: "number"}, bytes(size)))))))));
  return [`rank ${rank}`, ranks.device[rank], make("p", {}, chip(rank), ` on host ${ranks.hosts[ranks.host[rank]]}.`), keeps,
    make("h4", {}, `What it does in a step, in order: ${plural(steps.length, "instruction")}`), list, rest];
};
