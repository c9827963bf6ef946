// ---------------------------------------------------------------- facts in words

const MOST_LISTED = 12;

const link = (thing, text) => make("button", {type: "button", class: "to", onclick: () => show({op: thing})}, make("code", {}, text ?? nameOf(thing)));
const listed = (things, make_ = link) => {
  const list = make("span", {class: "listed"}, things.slice(0, MOST_LISTED).map(thing => make_(thing)));
  if (things.length > MOST_LISTED)
    list.append(make("button", {type: "button", class: "more", onclick: event => {
      event.target.replaceWith(...things.slice(MOST_LISTED).map(thing => make_(thing)));
    }}, `${(things.length - MOST_LISTED).toLocaleString("en")} more`));
  return list;
};
const fact = (name, ...value) => [make("dt", {}, name), make("dd", {}, ...value)];
const facts = rows => make("dl", {}, rows.flat());
const kindOf = node => {
  const way = nodes.way[node];
  if (node >= data.users) return `${opOf(node)}, added by partc`;
  return way < 0 ? opOf(node) : `${opOf(node)}, ${way === 0 ? "on the way forward" : way === 1 ? "part of a gradient" : "part of an update"}`;
};
const layerOf = node => nodes.group[node] < 0 ? -1 : groups.layer[nodes.group[node]];
const groupName = group => groups.head[group] < 0 ? data.layers[groups.layer[group]] : nodes.name[groups.head[group]];
const toLayer = layer => make("button", {type: "button", class: "to", onclick: () => show({layer})}, data.layers[layer]);
const toGroup = group => make("button", {type: "button", class: "to", onclick: () => show({group})}, make("code", {}, groupName(group)));
const toRank = rank => make("button", {type: "button", class: "to", onclick: () => show({rank})}, `rank ${rank}, ${ranks.device[rank]}`);

const sentence = node => {
  const split = splits[nodes.split[node]], layer = layerOf(node);
  const where = split.ranks.length ? `${split.words}, on ${devicesText(split.ranks)}` : split.words;
  return `${opOf(node)}${layer >= 0 ? ` of ${data.layers[layer]}` : ""}: ${where}.`;
};
const MICRO = /, micro-batch (\d+)$/;
const wordsOf = message => messages.words[message].replace(MICRO, "");
const listOfMessages = thing => {
  const texts = new Set((messagesAbout().get(thing) ?? []).map(at => `${wordsOf(instructions.what[at])}${instructions.bytes[at] ? ` (${bytes(instructions.bytes[at])})` : ""}`));
  const found = [...texts];
  return found.length === 0 ? [] : fact("What is sent for it", make("ul", {}, found.slice(0, 8).map(words => make("li", {}, words))),
    found.length > 8 ? `and ${found.length - 8} more` : null);
};

const nodeCard = node => {
  const split = splits[nodes.split[node]], group = nodes.group[node], runs = nodes.runsOf[nodes.runs[node]];
  const rows = [];
  if (split.ranks.length)
    rows.push(fact("Devices", swatchOf(split), ` ${devicesText(split.ranks)}`),
      fact("Predicted time", `${time(nodes.time[node])} of a device’s step of ${time(data.step)} (${share(nodes.time[node] / data.step)})`),
      fact("Bytes on one device", nodes.in[node] + nodes.out[node] ? `reads ${bytes(nodes.in[node])}, writes ${bytes(nodes.out[node])} a step` : "none of its own: its parts are made of what is sent"),
      fact(runs.length === 1 ? "Segment" : "Segments", listed(runs, segment => make("span", {class: "segment", title: segments.path[segment]}, segments.name[segment]))));
  if (nodes.shapes[nodes.shape[node]]) rows.push(fact("Whole result", nodes.shapes[nodes.shape[node]]));
  if (nodes.of[node] >= 0) rows.push(fact("Gradient of", link(nodes.of[node])));
  const own = gradients().get(node) ?? [];
  if (own.length) rows.push(fact("Its gradient", listed(own)));
  const sources = readsOf(node), targets = readers().get(node) ?? [];
  if (sources.length) rows.push(fact("Reads", listed(sources)));
  if (targets.length) rows.push(fact("Read by", listed(targets)));
  if (nodes.helpers[node]) rows.push(fact("Added for it", `${plural(nodes.helpers[node], "node")} that cut, join or move its parts`));
  rows.push(listOfMessages(node));
  if (group >= 0) rows.push(fact("Group", toGroup(group), " of layer ", toLayer(groups.layer[group])));
  return [kindOf(node), nameOf(node), make("p", {}, sentence(node)), facts(rows), considered(group)];
};
const swatchOf = split => swatch(cellsOf(split), 34);

const considered = group => {
  if (group < 0 || groups.head[group] < 0) return null;
  const rows = groups.alternatives[groups.considered[group]];
  const space = groups.dimensions[group] ? `${opOf(groups.head[group])} may be split at most by ${groups.dimensions[group]}.` : null;
  if (rows.length === 0)
    return make("div", {}, make("h4", {}, "What else was considered"), make("p", {class: "note"}, [groups.whyNone, space].filter(Boolean).join(" ")));
  const line = ([words, devices, computing, updating, memory, taken]) => make("tr", taken ? {class: "taken"} : {},
    make("th", {scope: "row"}, words, taken ? make("span", {class: "tick"}, " ✓ taken") : null, make("span", {class: "sub"}, `on ${plural(devices, "device")}`)),
    make("td", {class: "number"}, time(computing + updating), make("span", {class: "sub"}, updating ? `${time(computing)} + ${time(updating)}` : "")),
    make("td", {class: "number"}, bytes(memory)));
  return make("div", {}, make("h4", {}, "What else its group could be"),
    make("div", {class: "wide", tabindex: "0", role: "region", "aria-label": "What else its group could be"}, make("table", {},
      make("thead", {}, make("tr", {}, ["Configuration", "Predicted, alone", "Memory"].map((name, at) => make("th", at ? {class: "number", scope: "col"} : {scope: "col"}, name)))),
      make("tbody", {}, rows.map(line)))),
    make("p", {class: "note"}, "Computing, and gradients with the update, as the search prices them, each alone: what others wait for is not in it, so the quickest step may be another. Memory is of variables, on one device. ", space));
};

const variableCard = thing => {
  const at = thing - nodeCount, parts = [...holdersOf()[at]];
  const rows = [fact("Shape", `${variables.shape[at]}, ${variables.type[at]}: ${bytes(variables.bytes[at])}`)];
  if (variables.of[at] >= 0) rows.push(fact("Belongs to", link(variables.of[at])));
  const kept = ([key, list]) => {
    const [box, size] = key.split(" ").map(Number);
    return make("li", {}, `${ranks.boxes[box] ? `part ${ranks.boxes[box]}` : "whole"}, ${bytes(size)}: `, listed(list.slice(0, 4), toRank), list.length > 4 ? ` and ${plural(list.length - 4, "other rank")}` : null);
  };
  rows.push(fact("Kept", make("ul", {}, parts.slice(0, 16).map(kept)), parts.length > 16 ? `and ${parts.length - 16} more parts` : null));
  rows.push(fact("Exchange", variables.method[at] === "No exchange" ? "none: every device computes it alike" : variables.method[at]));
  const reading = readers().get(thing) ?? [];
  if (reading.length) rows.push(fact("Read by", listed(reading)));
  if (variables.next[at] >= 0) rows.push(fact("Next value made by", link(variables.next[at])));
  const slots = variables.of.map((of, slot) => of === thing ? slot + nodeCount : -1).filter(slot => slot >= 0);
  if (slots.length) rows.push(fact("Its state", listed(slots)));
  rows.push(listOfMessages(thing));
  const times = [...variables.times[at]].sort((a, b) => a[1] - b[1]);
  const table = times.length ? make("div", {}, make("h4", {}, "What else was considered"), make("table", {class: "narrow"},
    make("thead", {}, make("tr", {}, make("th", {scope: "col"}, "Exchange"), make("th", {class: "number", scope: "col"}, "Predicted, alone"))),
    make("tbody", {}, times.map(([way, ns]) => make("tr", way === variables.method[at] ? {class: "taken"} : {},
      make("th", {scope: "row"}, way, way === variables.method[at] ? make("span", {class: "tick"}, " ✓ taken") : null), make("td", {class: "number"}, time(ns)))))),
    variables.reason[at] ? make("p", {class: "note"}, variables.reason[at]) : null) : null;
  return [variables.role[at], nameOf(thing), facts(rows), table];
};

const inputCard = thing => ["data input", nameOf(thing), facts([fact("Read by", listed(readers().get(thing) ?? []))])];

const secondsOf = group => membersOfGroup()[group].reduce((sum, node) => sum + nodes.time[node], 0);
const headSplit = group => groups.head[group] < 0 ? null : splits[nodes.split[groups.head[group]]];
const ranksOfGroup = group => [...new Set(membersOfGroup()[group].flatMap(node => splits[nodes.split[node]].ranks))];

const groupCard = group => {
  const members = membersOfGroup()[group], head = groups.head[group];
  const list = way => members.filter(node => nodes.way[node] === way);
  const rows = [fact("Layer", toLayer(groups.layer[group]))];
  if (head >= 0) rows.push(fact("Operator", link(head), ` ${splits[nodes.split[head]].words}`));
  rows.push(fact("Devices", ranksOfGroup(group).length ? devicesText(ranksOfGroup(group)) : "none"));
  rows.push(fact("Predicted time", `${time(secondsOf(group))} on a device, a step`));
  WAYS.forEach((name, way) => list(way).length && rows.push(fact(`${name[0].toUpperCase()}${name.slice(1)}`, listed(list(way)))));
  return ["operator group", groupName(group), goIn(() => enter({group}), `Draw its ${plural(members.length, "node")}`), facts(rows), considered(group)];
};
const goIn = (onclick, text) => make("p", {}, make("button", {type: "button", class: "go", onclick}, text));

const layerCard = layer => {
  const own = groupsOfLayer()[layer];
  const rows = [
    fact("Predicted time", `${time(own.reduce((sum, group) => sum + secondsOf(group), 0))} on a device, a step`),
    fact("Devices", devicesText([...new Set(own.flatMap(ranksOfGroup))]) || "none"),
    fact(own.length === 1 ? "Group" : "Groups", listed(own, toGroup)),
  ];
  const held = variables.name.map((name, at) => at + nodeCount).filter(thing => variables.role[thing - nodeCount] === "parameter"
    && (readers().get(thing) ?? []).some(node => layerOf(node) === layer && nodes.way[node] === 0));
  if (held.length) rows.push(fact("Parameters", listed(held)));
  return ["layer", data.layers[layer], goIn(() => enter({layer}), own.length === 1 ? "Draw its nodes" : `Draw its ${plural(own.length, "group")}`), facts(rows)];
};

const card = document.querySelector("#graph .facts-card");
const showCard = ([kind, title, ...content]) => {
  card.replaceChildren(make("p", {class: "kicker"}, kind), make("h3", {}, make("code", {}, title)), ...content.filter(Boolean));
  card.scrollTop = 0;
};
