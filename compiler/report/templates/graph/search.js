// ---------------------------------------------------------------- search

const MOST_FOUND = 40;
const input = document.getElementById("graph-search"), results = document.getElementById("graph-results"), counted = document.getElementById("graph-count");
const sought = later(() => {
  const all = [];
  for (let thing = 0; thing < nodeCount + variableCount + data.inputs.length; thing++)
    all.push(`${nameOf(thing)} ${isNode(thing) ? opOf(thing) : isVariable(thing) ? "variable" : "input"}`.toLowerCase());
  return all;
});
const find = text => {
  const wanted = text.trim().toLowerCase(), found = [];
  if (!wanted) return found;
  const all = sought();
  for (let thing = 0; thing < all.length; thing++) {
    const at = all[thing].indexOf(wanted);
    if (at >= 0) found.push([at === 0 ? 0 : 1, isNode(thing) ? Math.max(0, nodes.way[thing]) : -1, nameOf(thing).length, thing]);
  }
  const exact = numbered().get(text.trim());
  found.sort((a, b) => (b[3] === exact) - (a[3] === exact) || a[0] - b[0] || a[1] - b[1] || a[2] - b[2] || a[3] - b[3]);
  return found.map(each => each[3]);
};
let found = [], active = -1;
const describe = thing => isNode(thing) ? `${kindOf(thing)}${layerOf(thing) >= 0 ? ` of ${data.layers[layerOf(thing)]}` : ""}`
  : isVariable(thing) ? `${variables.role[thing - nodeCount]}, ${variables.shape[thing - nodeCount]}` : "data input";
const listResults = () => {
  found = find(input.value);
  active = -1;
  const some = found.slice(0, MOST_FOUND);
  results.replaceChildren(...some.map((thing, at) => make("li", {id: `graph-result-${at}`, role: "option", "aria-selected": "false", onclick: () => choose(at)},
    make("code", {}, nameOf(thing)), make("span", {class: "sub"}, describe(thing)))));
  results.hidden = some.length === 0;
  input.setAttribute("aria-expanded", String(some.length > 0));
  input.removeAttribute("aria-activedescendant");
  counted.textContent = !input.value.trim() ? "" : found.length === 0 ? "Nothing of that name." : found.length > MOST_FOUND ? `${found.length.toLocaleString("en")} found, the first ${MOST_FOUND} shown.` : `${found.length} found.`;
};
const closeResults = () => {
  results.hidden = true;
  input.setAttribute("aria-expanded", "false");
  input.removeAttribute("aria-activedescendant");
};
const mark = at => {
  active = at;
  [...results.children].forEach((option, number) => option.setAttribute("aria-selected", String(number === at)));
  if (at < 0) return input.removeAttribute("aria-activedescendant");
  input.setAttribute("aria-activedescendant", `graph-result-${at}`);
  results.children[at].scrollIntoView({block: "nearest"});
};
const choose = at => {
  const thing = found[at];
  closeResults();
  counted.textContent = "";
  show({op: thing});
};
input.addEventListener("input", listResults);
input.addEventListener("focus", () => input.value.trim() && results.hidden && listResults());
input.addEventListener("keydown", event => {
  const count = results.hidden ? 0 : results.children.length;
  if (event.key === "ArrowDown" && count) mark((active + 1) % count);
  else if (event.key === "ArrowUp" && count) mark((active + count - (active < 0 ? 0 : 1)) % count);
  else if (event.key === "Enter" && count) choose(Math.max(active, 0));
  else if (event.key === "Escape" && count) closeResults();
  else return;
  event.preventDefault();
});
document.addEventListener("pointerdown", event => event.target.closest("#graph .search") || closeResults());
