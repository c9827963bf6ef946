// Data as packed_json.py packs it, whose first lines tell the forms.
const unpack = packed => {
  if (packed === null || typeof packed !== "object") return packed;
  if (Array.isArray(packed)) return packed.map(unpack);
  if (packed.repeating) return unpackNumbers(packed.repeating);
  if (packed.patterns) {
    const numbers = unpack(packed.numbers), patterns = packed.patterns.map(pattern => pattern.split("№"));
    let at = 0;
    return unpack(packed.which).map(which => patterns[which].reduce((text, part) => text + numbers[at++] + part));
  }
  if (packed.columns) {
    const columns = packed.columns.map(unpack);
    return columns[0].map((_, row) => columns.map(column => column[row]));
  }
  if (packed.lists) {
    const numbers = unpack(packed.lists);
    let at = 0;
    return unpack(packed.lengths).map(length => numbers.slice(at, at += length));
  }
  if (packed.different) {
    const different = packed.different.map(unpack);
    return unpack(packed.which).map(which => different[which]);
  }
  return Object.fromEntries(Object.entries(packed).map(([key, value]) => [key, unpack(value)]));
};
const unpackNumbers = code => {
  const differences = [];
  for (let at = 0; at < code.length;) {
    const end = at + code[at] + 1;
    while (++at < end) differences.push(code[at]);
    if (at < code.length) {
      for (let left = code[at + 1]; left > 0; left--) differences.push(differences[differences.length - code[at]]);
      at += 2;
    }
  }
  let number = 0;
  return differences.map(difference => number += difference);
};
