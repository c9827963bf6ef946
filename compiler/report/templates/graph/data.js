// ---------------------------------------------------------------- the data, decoded

const data = unpack(JSON.parse(document.getElementById("graph-data").textContent));
const {nodes, groups, variables, ranks, segments, messages, instructions} = data;
const nodeCount = nodes.name.length, variableCount = variables.name.length;
const WAYS = ["forward", "gradient", "update"];

const starts = lengths => {
  const found = [0];
  for (const length of lengths) found.push(found[found.length - 1] + length);
  return found;
};
const unflatten = column => {
  const at = starts(column.lengths);
  return index => column.of.slice(at[index], at[index + 1]);
};
const readsOf = unflatten(nodes.reads);
const nodesOfSegment = unflatten(segments.nodes);
const subjectsOf = unflatten(messages.about);

const expand = runs => {
  const found = [];
  for (let at = 0; at < runs.length; at += 3)
    for (let n = 0; n < runs[at + 2]; n++) found.push(runs[at] + n * runs[at + 1]);
  return found;
};
const splits = nodes.splits.map(([words, rows, columns, together, runs]) => ({words, rows, columns, together, ranks: expand(runs)}));

const later = make => {
  let made = null;
  return () => made ??= make();
};
const readers = later(() => {
  const found = new Map();
  for (let node = 0; node < nodeCount; node++)
    for (const source of readsOf(node)) {
      if (!found.has(source)) found.set(source, []);
      found.get(source).push(node);
    }
  return found;
});
const gradients = later(() => {
  const found = new Map();
  nodes.of.forEach((of, node) => {
    if (of < 0) return;
    if (!found.has(of)) found.set(of, []);
    found.get(of).push(node);
  });
  return found;
});
const membersOfGroup = later(() => {
  const found = groups.head.map(() => []);
  nodes.group.forEach((group, node) => group >= 0 && found[group].push(node));
  return found;
});
const groupsOfLayer = later(() => {
  const found = data.layers.map(() => []);
  groups.layer.forEach((layer, group) => found[layer].push(group));
  return found;
});
const messagesAbout = later(() => {
  const found = new Map();
  instructions.kind.forEach((kind, at) => {
    if (kind !== 1) return;
    for (const subject of subjectsOf(instructions.what[at])) {
      if (!found.has(subject)) found.set(subject, []);
      found.get(subject).push(at);
    }
  });
  return found;
});
const holdersOf = later(() => {
  const found = variables.name.map(() => new Map());
  ranks.holds.forEach((list, rank) => {
    const held = ranks.holdings[list];
    for (let at = 0; at < held.length; at += 3) {
      const parts = found[held[at] - nodeCount], key = `${held[at + 1]} ${held[at + 2]}`;
      if (!parts.has(key)) parts.set(key, []);
      parts.get(key).push(rank);
    }
  });
  return found;
});

// A thing's number tells what it is: nodes, then variables, then data inputs.
const isNode = thing => thing < nodeCount;
const isVariable = thing => thing >= nodeCount && thing < nodeCount + variableCount;
const nameOf = thing => isNode(thing) ? nodes.name[thing]
  : isVariable(thing) ? variables.name[thing - nodeCount] : data.inputs[thing - nodeCount - variableCount];
const opOf = node => nodes.ops[nodes.op[node]];
const numbered = later(() => {
  const found = new Map();
  const all = nodeCount + variableCount + data.inputs.length;
  for (let thing = all - 1; thing >= 0; thing--) found.set(nameOf(thing), thing);
  for (let thing = nodeCount + variableCount - 1; thing >= nodeCount; thing--)
    if (isNode(found.get(nameOf(thing)))) found.set(`variable ${nameOf(thing)}`, thing);
  return found;
});

// ---------------------------------------------------------------- numbers and names as a person reads them

const digits = value => value >= 99.95 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 9.995 ? 1 : 2);
const time = ns => {
  if (!ns) return "0 s";
  for (const [factor, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]])
    if (ns >= factor * 0.9995) return `${digits(ns / factor)}\u00a0${unit}`;
  return "under 1\u00a0µs";
};
const bytes = value => {
  for (const [factor, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= factor * 0.9995) return `${digits(value / factor)}\u00a0${unit}`;
  return `${Math.round(value)}\u00a0B`;
};
const share = value => value === 0 ? "0\u00a0%" : `${(value * 100).toFixed(value >= 0.1 ? 0 : value >= 0.01 ? 1 : 2)}\u00a0%`;
const plural = (count, noun) => `${count.toLocaleString("en")}\u00a0${noun}${count === 1 ? "" : "s"}`;
const ranges = numbers => {
  const runs = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && number === last[1] + 1) last[1] = number; else runs.push([number, number]);
  }
  const told = runs.slice(0, 6).map(([a, b]) => a === b ? `${a}` : `${a}–${b}`).join(", ");
  return runs.length > 6 ? `${told}, …` : told;
};
const ranksText = list => list.length === 0 ? "no rank" : `${list.length === 1 ? "rank" : "ranks"} ${ranges(list)}`;
const devicesText = list => list.length > 4 ? `${plural(list.length, "device")} (${ranksText(list)})`
  : list.map(rank => ranks.device[rank]).join(", ").replace(/, ([^,]*)$/, " and $1");
const shortName = (name, most) => name.length <= most ? name : `…${name.slice(name.length - most + 1)}`;

const make = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
};
const SVG = document.querySelector("#graph .edges").namespaceURI;
const draw = (tag, attributes) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

// ---------------------------------------------------------------- colours of devices

const MOST_CELLS = 64;
const cellsOf = split => {
  // A cell for each part; where there are more than can be seen, one for several neighbours.
  const cells = split.rows * split.columns;
  let rows = split.rows, columns = split.columns, every = 1;
  while (rows * columns > MOST_CELLS) {
    if (columns > 1) columns = Math.ceil(columns / 2); else rows = Math.ceil(rows / 2);
    every = Math.ceil(cells / (rows * columns));
  }
  const together = Math.min(split.together, Math.max(1, Math.floor(16 / columns)));
  const found = [];
  for (let cell = 0; cell < rows * columns; cell++)
    for (let copy = 0; copy < together; copy++)
      found.push(split.ranks[Math.min(cell * every * split.together + copy, split.ranks.length - 1)]);
  return {rows, columns: columns * together, ranks: found};
};
const swatch = (grid, size) => {
  const {rows, columns} = grid;
  const svg = draw("svg", {viewBox: `0 0 ${columns * 10} ${rows * 10}`, preserveAspectRatio: "none", width: size, height: size, class: "parts", "aria-hidden": "true"});
  grid.ranks.forEach((rank, at) => svg.append(draw("rect", {
    x: at % columns * 10 + 0.5, y: Math.floor(at / columns) * 10 + 0.5, width: 9, height: 9,
    ...(ranks.fill[rank] ? {fill: ranks.fill[rank]} : {class: "of-server"}),
  })));
  return svg;
};
const strip = list => ({rows: 1, columns: Math.min(list.length, 16), ranks: list.filter((_, at) => at % Math.ceil(list.length / 16) === 0).slice(0, 16)});
const chip = rank => make("span", {
  class: ranks.fill[rank] ? "rank" : "rank of-server", title: ranks.device[rank],
  style: ranks.fill[rank] ? `background:${ranks.fill[rank]};color:${ranks.ink[rank]}` : null,
}, `${rank}`);
