// ---------------------------------------------------------------- where the reader is

let shown = {};
const HASHES = {op: thing => isVariable(thing) && isNode(numbered().get(nameOf(thing))) ? `variable ${nameOf(thing)}` : nameOf(thing), layer: layer => data.layers[layer], group: groupName, rank: String};

function show(what, {moves = true, records = true} = {}) {
  shown = what;
  const [kind] = Object.keys(what), value = what[kind];
  showCard(kind === "rank" ? rankCard(value) : kind === "layer" ? layerCard(value) : kind === "group" ? groupCard(value)
    : isNode(value) ? nodeCard(value) : isVariable(value) ? variableCard(value) : inputCard(value));
  if (moves) bringIntoView(what);
  markSelected();
  rankChoice.value = kind === "rank" ? String(value) : "";
  if (records) history.replaceState(null, "", `#${kind}=${encodeURIComponent(HASHES[kind](value))}`);
}
const follow = () => {
  const found = /^#(op|rank|layer|group)=(.*)$/.exec(location.hash);
  if (!found) return false;
  let name = found[2];
  try { name = decodeURIComponent(name); } catch { return false; }
  const value = found[1] === "op" ? numbered().get(name) : found[1] === "rank" ? (ranks.device[name] === undefined ? undefined : Number(name))
    : found[1] === "layer" ? data.layers.indexOf(name) : groups.head.findIndex((_, group) => groupName(group) === name);
  if (value === undefined || value < 0) return false;
  show({[found[1]]: value}, {records: false});
  document.getElementById("graph").scrollIntoView();
  return true;
};

const rankChoice = document.getElementById("graph-rank");
rankChoice.append(...ranks.device.map((device, rank) => make("option", {value: rank}, `${rank}: ${device}`)));
rankChoice.addEventListener("change", () => rankChoice.value !== "" && show({rank: Number(rankChoice.value)}));
const MOST_CHIPS = 64;
const workers = ranks.device.map((_, rank) => rank);
document.getElementById("graph-devices").append(...ranks.hosts.slice(0, 32).map((host, number) => make("span", {class: "key"},
  ...workers.filter(rank => ranks.host[rank] === number).slice(0, MOST_CHIPS).map(chip), host)));
if (ranks.hosts.length > 32) document.getElementById("graph-devices").append(`and ${plural(ranks.hosts.length - 32, "more host")}`);
document.querySelector("#graph .explorer").hidden = false;
addEventListener("hashchange", follow);
enter({});
if (!follow()) show({layer: 0}, {moves: false, records: false});
