// ---------------------------------------------------------------- the drawing

const SIZES = {container: {width: 196, height: 58}, node: {width: 184, height: 46}};
const GAP_X = 22, GAP_Y = 30, GAP_COLUMN = 46, LANE_TITLE = 44, MARGIN = 20;
const LEAST_TEXT = 11.5, TEXT = 13, CLOSE = 2.4, SMALLEST = 0.05, STARTS_AT = 0.62, GROUP_STARTS_AT = 0.4;
const MOST_DRAWN = 700;

const drawing = document.querySelector("#graph .drawing"), world = drawing.querySelector(".world");
const edgesSvg = drawing.querySelector(".edges"), trail = document.querySelector("#graph .trail");
let place = {}, boxes = [], edges = [], extent = {width: 1, height: 1}, focused = 0, settled = 0;
const eye = {x: 0, y: 0, scale: 1};

const arrange = ([things, columns, rows, places, width, ends], kind, left, top) => {
  const size = SIZES[kind === "node" ? "node" : "container"];
  const step = size.width + GAP_X, column = width * step - GAP_X + GAP_COLUMN;
  const first = boxes.length, long = Math.max(0, ...rows) + 1;
  things.forEach((thing, at) => boxes.push({kind, thing, ...size,
    x: left + columns[at] * column + places[at] * step / 2, y: top + rows[at] * (size.height + GAP_Y), column: columns[at], order: columns[at] * long + rows[at]}));
  for (let at = 0; at < ends.length; at += 2) edges.push([first + ends[at], first + ends[at + 1]]);
  const own = boxes.slice(first);
  return {width: Math.max(0, ...own.map(box => box.x + box.width - left)), height: Math.max(0, ...own.map(box => box.y + box.height - top))};
};

// Forward, gradient and update beside each other where there is room, else below each other.
const lanesOf = group => {
  const room = (drawing.clientWidth - 24) / STARTS_AT, titles = [];
  let left = 0, top = 0, deep = 0, width = 0;
  data.drawings.ofGroups[group].forEach((lane, way) => {
    if (!lane[0].length) return;
    const first = boxes.length, size = arrange(lane, "node", left, top + LANE_TITLE);
    if (left && left + size.width > room) {
      for (const box of boxes.slice(first)) [box.x, box.y] = [box.x - left, box.y + deep];
      [left, top, deep] = [0, top + deep, 0];
    }
    titles.push([WAYS[way], left, top, lane[0].length]);
    width = Math.max(width, left + size.width);
    left += size.width + 2 * GAP_COLUMN;
    deep = Math.max(deep, size.height + LANE_TITLE + MARGIN);
  });
  const inside = new Map(boxes.map((box, at) => [box.thing, at])), known = new Set(edges.map(String));
  boxes.forEach((box, at) => readsOf(box.thing).forEach(source => {
    const edge = [inside.get(source), at];
    if (inside.has(source) && !known.has(String(edge))) edges.push([...edge, "across"]);
  }));
  extent = {width, height: top + deep};
  return titles;
};

function enter(where, keep = null) {
  // A layer of one group is drawn as that group.
  if (where.layer !== undefined && groupsOfLayer()[where.layer].length === 1) where = {group: groupsOfLayer()[where.layer][0]};
  place = where;
  boxes = [];
  edges = [];
  let titles = [];
  if (where.group !== undefined) titles = lanesOf(where.group);
  else extent = where.layer !== undefined ? arrange(data.drawings.ofLayers[where.layer], "group", 0, MARGIN) : arrange(data.drawings.layers, "layer", 0, MARGIN);
  if (where.group === undefined) extent.height += 2 * MARGIN;
  focused = Math.max(0, boxes.findIndex(box => box.thing === keep));
  world.querySelectorAll(".lane").forEach(title => title.remove());
  for (const [name, x, y] of titles) world.append(make("span", {class: "lane", style: `left:${x}px;top:${y}px`}, name));
  showTrail();
  showLanes(titles);
  begin();
}
// What a group has, each a way to it: a large group does not fit into the first view.
const showLanes = titles => {
  const lanes = document.querySelector("#graph .lanes");
  lanes.hidden = titles.length < 2;
  lanes.replaceChildren(...titles.map(([name, x, y, count]) =>
    make("button", {type: "button", class: "to", onclick: () => { [eye.x, eye.y] = [12 - x * eye.scale, 12 - y * eye.scale]; inside(); look(); }}, `${name[0].toUpperCase()}${name.slice(1)}, ${plural(count, "node")}`)));
};
const parentOf = where => where.group !== undefined && groupsOfLayer()[groups.layer[where.group]].length > 1 ? {layer: groups.layer[where.group]}
  : where.group !== undefined || where.layer !== undefined ? {} : null;
const leave = () => {
  const above = parentOf(place);
  if (above) enter(above, above.layer !== undefined ? place.group : place.layer ?? groups.layer[place.group]);
};
const showTrail = () => {
  const steps = [["All layers", {}]];
  const layer = place.layer ?? (place.group === undefined ? undefined : groups.layer[place.group]);
  if (layer !== undefined) steps.push([data.layers[layer], {layer}]);
  if (place.group !== undefined && groupsOfLayer()[layer].length > 1) steps.push([groupName(place.group), {group: place.group}]);
  trail.replaceChildren(...steps.flatMap(([text, where], at) => at === steps.length - 1
    ? [make("span", {"aria-current": "location"}, text)] : [make("button", {type: "button", class: "to", onclick: () => enter(where)}, text), " › "]));
};

// ---------------------------------------------------------------- boxes

const gridOf = box => {
  if (box.kind === "node") return splits[nodes.split[box.thing]].ranks.length ? cellsOf(splits[nodes.split[box.thing]]) : null;
  const own = box.kind === "group" ? [box.thing] : groupsOfLayer()[box.thing];
  const ways = new Set(own.map(headSplit).filter(Boolean));
  if (ways.size === 1) return cellsOf([...ways][0]);
  const all = [...new Set(own.flatMap(ranksOfGroup))].sort((a, b) => a - b);
  return all.length ? strip(all) : null;
};
const textOf = box => {
  if (box.kind === "layer") {
    const own = groupsOfLayer()[box.thing];
    return [data.layers[box.thing], own.length === 1 && groups.head[own[0]] >= 0 ? opOf(groups.head[own[0]]) : plural(own.length, "group")];
  }
  if (box.kind === "group") {
    const head = groups.head[box.thing];
    return head < 0 ? [groupName(box.thing), plural(membersOfGroup()[box.thing].length, "node")] : [opOf(head), ownName(head)];
  }
  return [opOf(box.thing), ownName(box.thing)];
};
// A name without the operator that it begins with, for that is above it.
const ownName = node => nodes.name[node].startsWith(`${opOf(node)}:`) ? nodes.name[node].slice(opOf(node).length + 1) : nodes.name[node];
const labelOf = box => {
  const ranks_ = box.kind === "node" ? splits[nodes.split[box.thing]].ranks : box.kind === "group" ? ranksOfGroup(box.thing) : [...new Set(groupsOfLayer()[box.thing].flatMap(ranksOfGroup))];
  return `${box.kind === "node" ? "" : `${box.kind} `}${textOf(box).join(", ")}, on ${ranksText(ranks_)}`;
};
const element = at => {
  const box = boxes[at];
  if (!box.element) {
    const grid = gridOf(box), [title, sub] = textOf(box);
    box.element = make("button", {type: "button", class: `box ${box.kind}${box.kind === "node" && nodes.way[box.thing] > 0 ? " back" : ""}`, tabindex: "-1", "aria-label": labelOf(box), title: box.kind === "node" ? nodes.name[box.thing] : textOf(box).join(", "),
      style: `left:${box.x}px;top:${box.y}px;width:${box.width}px;height:${box.height}px`, onclick: () => activate(at)},
      grid ? swatch(grid, 30) : null, make("span", {class: "name"}, make("b", {}, title), make("span", {}, sub)));
  }
  return box.element;
};
const activate = at => {
  const box = boxes[at], same = isShown(box);
  focused = at;
  if (box.kind !== "node" && same) return enter({[box.kind]: box.thing});
  show({[box.kind === "node" ? "op" : box.kind]: box.thing}, {moves: false});
};
const isShown = box => shown[box.kind === "node" ? "op" : box.kind] === box.thing;
function markSelected() {
  boxes.forEach((box, at) => {
    if (!box.element) return;
    box.element.classList.toggle("shown", isShown(box));
    box.element.setAttribute("aria-pressed", String(isShown(box)));
    box.element.tabIndex = at === focused ? 0 : -1;
  });
}

// ---------------------------------------------------------------- edges: down to the next row, or around a column

const path = (from, to) => {
  const x1 = from.x + from.width / 2, y1 = from.y + from.height, x2 = to.x + to.width / 2, y2 = to.y;
  if (from.column !== to.column && to.x > from.x) {
    const gutter = to.x - GAP_COLUMN / 2, low = y1 + GAP_Y / 3, high = y2 - GAP_Y / 2, r = 6;
    return `M${x1} ${y1}V${low - r}Q${x1} ${low} ${x1 + r} ${low}H${gutter - r}Q${gutter} ${low} ${gutter} ${low - r}V${high + r}Q${gutter} ${high} ${gutter + r} ${high}H${x2 - r}Q${x2} ${high} ${x2} ${high + r}V${y2}`;
  }
  const gap = y2 - y1;
  if (gap > 0 && gap < GAP_Y * 1.5) return `M${x1} ${y1}C${x1} ${y1 + gap / 2} ${x2} ${y2 - gap / 2} ${x2} ${y2}`;
  const side = Math.max(from.x + from.width, to.x + to.width) + GAP_X * 0.7;
  return `M${from.x + from.width} ${from.y + from.height / 2}C${side} ${from.y + from.height / 2} ${side} ${to.y + to.height / 2} ${to.x + to.width} ${to.y + to.height / 2}`;
};
const drawEdges = () => {
  edgesSvg.setAttribute("width", extent.width + 80);
  edgesSvg.setAttribute("height", extent.height + 40);
  const lines = {across: [], skip: [], line: [], head: []};
  for (const [a, b, kind] of edges) {
    const from = boxes[a], to = boxes[b];
    if (kind) {
      lines.across.push(`M${from.x + from.width / 2} ${from.y + from.height / 2}L${to.x + to.width / 2} ${to.y + to.height / 2}`);
      continue;
    }
    const arrives = to.order === from.order + 1;
    lines[arrives ? "line" : "skip"].push(path(from, to));
    if (arrives) lines.head.push(`M${to.x + to.width / 2 - 4} ${to.y - 6}h8l-4 6z`);
  }
  edgesSvg.replaceChildren(...Object.entries(lines).map(([name, own]) => draw("path", {class: name, d: own.join("")})));
};

// ---------------------------------------------------------------- moving and zooming

const look = () => {
  world.style.transform = `translate(${eye.x}px,${eye.y}px) scale(${eye.scale})`;
  drawing.style.setProperty("--text", `${Math.max(TEXT, LEAST_TEXT / eye.scale)}px`);
  drawing.classList.toggle("far", eye.scale < 0.55);
  drawing.classList.toggle("very-far", eye.scale < 0.24);
  const view = {left: -eye.x / eye.scale, top: -eye.y / eye.scale, right: (drawing.clientWidth - eye.x) / eye.scale, bottom: (drawing.clientHeight - eye.y) / eye.scale};
  const many = boxes.length > MOST_DRAWN, text = Math.max(TEXT, LEAST_TEXT / eye.scale);
  boxes.forEach((box, at) => {
    const seen = !many || at === focused || (box.x < view.right && box.x + box.width > view.left && box.y < view.bottom && box.y + box.height > view.top);
    if (seen) {
      if (!element(at).isConnected) world.append(element(at));
      if (box.text !== text) {
        // Names lose their beginning, which is what those of a picture have in common.
        box.text = text;
        const room = (box.width - 62) / text, [title, sub] = textOf(box), [bold, plain] = box.element.lastChild.children;
        if (box.kind === "layer") bold.textContent = shortName(title, Math.floor(room / 0.68));
        else plain.textContent = shortName(sub, Math.floor(room / 0.62));
      }
    } else if (box.element) box.element.remove();
  });
  markSelected();
};
const inside = () => {
  // Something of the drawing stays in view.
  const margin = 60, width = extent.width * eye.scale, height = extent.height * eye.scale;
  eye.x = Math.min(drawing.clientWidth - margin, Math.max(margin - width, eye.x));
  eye.y = Math.min(drawing.clientHeight - margin, Math.max(margin - height, eye.y));
};
const whole = () => Math.min((drawing.clientWidth - 24) / extent.width, (drawing.clientHeight - 24) / extent.height);
const centre = scale => {
  eye.scale = scale;
  eye.x = Math.max(12, (drawing.clientWidth - extent.width * scale) / 2);
  eye.y = Math.max(12, (drawing.clientHeight - extent.height * scale) / 2);
};
const tall = () => matchMedia("(max-width: 900px)").matches ? 420 : 560;
const begin = () => {
  world.replaceChildren(edgesSvg, ...world.querySelectorAll(".lane"));
  drawEdges();
  drawing.style.height = `${tall()}px`;
  const least = place.group === undefined ? STARTS_AT : GROUP_STARTS_AT, wide = (drawing.clientWidth - 24) / extent.width;
  drawing.style.height = `${Math.round(Math.min(tall(), Math.max(240, extent.height * Math.min(1, Math.max(least, wide)) + 24)))}px`;
  centre(Math.min(1, Math.max(least, whole())));
  settled = performance.now();
  look();
};
const zoom = (factor, x = drawing.clientWidth / 2, y = drawing.clientHeight / 2) => {
  if (performance.now() - settled < 350) return;
  const scale = Math.min(CLOSE * 1.05, Math.max(SMALLEST, eye.scale * factor));
  const at = boxes.findIndex(box => box.kind !== "node" && isAt(box, x, y));
  if (factor > 1 && scale > CLOSE && at >= 0) return enter({[boxes[at].kind]: boxes[at].thing});
  if (factor < 1 && scale < Math.min(whole(), STARTS_AT) * 0.6 && parentOf(place)) return leave();
  eye.x = x - (x - eye.x) * scale / eye.scale;
  eye.y = y - (y - eye.y) * scale / eye.scale;
  eye.scale = Math.max(scale, Math.min(whole(), STARTS_AT) * 0.5);
  inside();
  look();
};
const isAt = (box, x, y) => {
  const own = {x: (x - eye.x) / eye.scale, y: (y - eye.y) / eye.scale};
  return own.x >= box.x && own.x <= box.x + box.width && own.y >= box.y && own.y <= box.y + box.height;
};
function bringIntoView(what) {
  const thing = what.op ?? what.group ?? what.layer;
  if (what.rank !== undefined || (what.op !== undefined && !isNode(what.op))) return;
  const group = what.op === undefined ? what.group : nodes.group[what.op];
  if (group !== undefined && group < 0) return;
  if (what.op !== undefined) enter({group}, what.op);
  else if (what.group !== undefined) enter({layer: groups.layer[group]}, group);
  else enter({}, what.layer);
  const box = boxes[focused];
  if (!box || box.thing !== thing) return;
  toMiddle(box);
}
const toMiddle = box => {
  const left = box.x * eye.scale + eye.x, top = box.y * eye.scale + eye.y;
  const fits = left > 8 && top > 8 && left + box.width * eye.scale < drawing.clientWidth - 8 && top + box.height * eye.scale < drawing.clientHeight - 8;
  if (!fits) {
    eye.x = drawing.clientWidth / 2 - (box.x + box.width / 2) * eye.scale;
    eye.y = drawing.clientHeight / 2 - (box.y + box.height / 2) * eye.scale;
  }
  look();
};

// ---------------------------------------------------------------- mouse, touch, keyboard

const pointers = new Map();
let dragged = false;
drawing.addEventListener("pointerdown", event => {
  pointers.set(event.pointerId, {x: event.clientX, y: event.clientY});
  if (pointers.size === 1) dragged = false;
});
const spread = () => {
  const [a, b] = [...pointers.values()], box = drawing.getBoundingClientRect();
  return {distance: Math.hypot(a.x - b.x, a.y - b.y), x: (a.x + b.x) / 2 - box.left, y: (a.y + b.y) / 2 - box.top};
};
addEventListener("pointermove", event => {
  const before = pointers.get(event.pointerId);
  if (!before) return;
  const now = {x: event.clientX, y: event.clientY};
  if (pointers.size === 2) {
    const wide = spread().distance;
    pointers.set(event.pointerId, now);
    const after = spread();
    dragged = true;
    zoom(after.distance / Math.max(wide, 1), after.x, after.y);
    return;
  }
  if (!dragged && Math.hypot(now.x - before.x, now.y - before.y) < 5) return;
  dragged = true;
  drawing.classList.add("moving");
  pointers.set(event.pointerId, now);
  eye.x += now.x - before.x;
  eye.y += now.y - before.y;
  inside();
  look();
});
for (const kind of ["pointerup", "pointercancel"])
  addEventListener(kind, event => {
    pointers.delete(event.pointerId);
    drawing.classList.remove("moving");
  });
drawing.addEventListener("click", event => {
  if (dragged) event.stopPropagation();
  dragged = false;
}, true);
drawing.addEventListener("dragstart", event => event.preventDefault());
drawing.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const box = drawing.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
}, {passive: false});
document.querySelector("#graph .zooms").addEventListener("click", event => {
  const act = event.target.dataset.act;
  if (act === "fit") { centre(Math.min(1, whole())); look(); }
  else if (act) zoom(act === "in" ? 1.35 : 1 / 1.35);
});

const TOWARDS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
const neighbour = ([right, down]) => {
  const here = boxes[focused], middle = box => [box.x + box.width / 2, box.y + box.height / 2], [x, y] = middle(here);
  let best = focused, least = Infinity;
  boxes.forEach((box, at) => {
    const [bx, by] = middle(box), along = (bx - x) * right + (by - y) * down, aside = Math.abs((bx - x) * down) + Math.abs((by - y) * right);
    if (along > 1 && along + 2 * aside < least) [best, least] = [at, along + 2 * aside];
  });
  return best;
};
drawing.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (TOWARDS[event.key]) {
    if (!boxes.length) return;
    focused = neighbour(TOWARDS[event.key]);
    toMiddle(boxes[focused]);
    element(focused).focus({preventScroll: true});
  } else if (event.key === "+" || event.key === "=") zoom(1.35);
  else if (event.key === "-") zoom(1 / 1.35);
  else if (event.key === "0") { centre(Math.min(1, whole())); look(); }
  else if (event.key === "Backspace" || event.key === "Escape") {
    leave();
    if (boxes.length) element(focused).focus({preventScroll: true});
  } else return;
  event.preventDefault();
});
addEventListener("resize", () => { if (drawing.clientWidth) { inside(); look(); } });  // on paper there is no drawing
