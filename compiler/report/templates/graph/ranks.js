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
// Instructions that follow each other and differ in their micro-batch alone are one line.
const linesOf = (rank, steps) => {
  const lines = [];
  for (const at of steps) {
    const kind = instructions.kind[at], message = instructions.what[at];
    const key = kind === 0 ? `run ${message}` : kind === 1 ? `start ${instructions.at[at]} ${wordsOf(message)}` : kind === 2 ? "wait" : "store";
    const last = lines[lines.length - 1];
    if (last && last.key === key) last.steps.push(at); else lines.push({key, kind, steps: [at]});
  }
  return lines;
};
const tagsOf = steps => steps.map(at => instructions.tag[at]).reduce((runs, tag) => {
  const last = runs[runs.length - 1];
  if (last && tag === last[1] + 1) last[1] = tag; else runs.push([tag, tag]);
  return runs;
}, []).map(([a, b]) => a === b ? `#${a}` : `#${a}–${b}`).join(", ");
const timesText = steps => steps.length > 1 ? `, ${steps.length} times` : "";
const stepLine = (rank, {kind, steps}) => {
  const at = steps[0];
  if (kind === 0) {
    const segment = instructions.what[at], own = nodesOfSegment(segment);
    const details = make("details", {}, make("summary", {}, `Run ${segments.name[segment]}${timesText(steps)}: ${plural(own.length, "node")}, ${time(segments.time[segment])}`));
    details.addEventListener("toggle", () => details.childElementCount === 1 && details.append(listed(own)), {once: true});
    return make("li", {class: "run"}, details);
  }
  if (kind === 1) {
    const group = instructions.groups[instructions.at[at]][ranks.groupsOf[ranks.groups[rank]][instructions.at[at]]] ?? [];
    const others = group.filter(other => other !== rank), message = instructions.what[at];
    const sum = steps.reduce((all, step) => all + instructions.bytes[step], 0);
    const numbers = steps.map(step => MICRO.exec(messages.words[instructions.what[step]])).filter(Boolean).map(found => Number(found[1]));
    const micro = numbers.length ? `, of micro-batch${numbers.length > 1 ? "es" : ""} ${ranges(numbers)}` : "";
    return make("li", {class: "start"}, `${tagsOf(steps)} ${wordsOf(message)}${micro}${sum ? ` (${bytes(sum)})` : ""}`,
      others.length ? make("span", {class: "note"}, `, with ${ranksText(others)}`) : null);
  }
  if (kind === 2) return make("li", {class: "wait"}, `Wait for ${tagsOf(steps)}`);
  return make("li", {class: "store"}, steps.length > 1 ? `Copy the next values of ${steps.length} variables over them` : "Copy a variable’s next value over it");
};
const rankCard = rank => {
  const held = ranks.holdings[ranks.holds[rank]], program = programOf(rank), steps = linesOf(rank, program), lines = [];
  for (let at = 0; at < held.length; at += 3) lines.push(held.slice(at, at + 3));
  const total = lines.reduce((sum, [, , size]) => sum + size, 0);
  const list = make("ol", {class: "steps"}, steps.slice(0, FIRST_STEPS).map(step => stepLine(rank, step)));
  const rest = steps.length > FIRST_STEPS ? make("button", {type: "button", class: "go", onclick: event => {
    list.append(...steps.slice(FIRST_STEPS).map(step => stepLine(rank, step)));
    event.target.remove();
  }}, `The other ${(steps.length - FIRST_STEPS).toLocaleString("en")} steps`) : null;
  const keeps = make("details", {}, make("summary", {}, `Keeps ${plural(lines.length, "variable")}, ${bytes(total)}`));
  keeps.addEventListener("toggle", () => keeps.childElementCount === 1 && keeps.append(make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, ["Variable", "Part", "Bytes"].map((name, at) => make("th", {scope: "col", class: at === 2 ? "number" : null}, name)))),
    make("tbody", {}, lines.map(([variable, box, size]) => make("tr", {}, make("td", {}, link(variable)), make("td", {}, ranks.boxes[box] || "whole"), make("td", {class: "number"}, bytes(size)))))))));
  return [`rank ${rank}`, ranks.device[rank], make("p", {}, chip(rank), ` on host ${ranks.hosts[ranks.host[rank]]}.`), keeps,
    make("h4", {}, `What it does in a step, in order: ${plural(program.length, "instruction")}`), list, rest];
};
