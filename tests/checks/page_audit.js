(smallest, contrast) => {
  const root = document.documentElement;
  const where = element => {
    const named = element.closest("[id]");
    return (named ? "#" + named.id + " " : "") + element.tagName.toLowerCase() +
      (element.getAttribute("class") ? "." + element.getAttribute("class").split(/\s+/).join(".") : "") +
      ": " + (element.textContent || "").trim().replace(/\s+/g, " ").slice(0, 60);
  };
  const shown = element => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });

  // Elements with text of their own, as it is seen.
  const told = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("script, style, title, desc, option, .skip, .unseen")) continue;
    if (told.at(-1) !== element && shown(element)) told.push(element);
  }
  const size = element => {
    const own = parseFloat(getComputedStyle(element).fontSize);
    const matrix = element instanceof SVGElement && element.getScreenCTM();
    return matrix ? own * Math.hypot(matrix.b, matrix.d) : own;
  };

  // Colours: what is painted behind a text.
  const channels = colour => (colour.match(/[\d.]+/g) || []).map(Number);
  const luminance = colour => {
    const [r, g, b] = channels(colour).slice(0, 3).map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      const [, , , alpha = 1] = channels(colour);
      if (colour !== "transparent" && alpha > 0.99) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const ratio = (one, other) => {
    const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  };
  const pale = told.filter(e => !(e instanceof SVGElement) && !e.matches(".onbar")).flatMap(e => {
    const found = ratio(getComputedStyle(e).color, background(e));
    return found < contrast - 0.01 ? [found.toFixed(2) + " " + where(e)] : [];
  });

  const inside = (text, area) => {
    const own = text.getBoundingClientRect(), box = area.getBoundingClientRect();
    return !own.width || (own.left >= box.left - 1 && own.right <= box.right + 1);
  };
  const spills = [...document.querySelectorAll("svg text")]
    .filter(text => shown(text) && !inside(text, text.ownerSVGElement)).map(where);
  for (const area of document.querySelectorAll("svg .host, svg .server, svg .device")) {
    const texts = [...area.parentNode.querySelectorAll(":scope > text")];
    spills.push(...texts.filter(text => !inside(text, area)).map(where));
  }

  // Drawings: texts on each other, and what begins beside the part that is seen before anybody scrolls.
  const area = (one, other) => Math.min(one.right, other.right) - Math.max(one.left, other.left) > 2 &&
    Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 4;
  const overlaps = [...document.querySelectorAll("svg")].flatMap(svg => {
    const texts = [...svg.querySelectorAll("text")].filter(shown).slice(0, 300);
    const boxes = texts.map(text => text.getBoundingClientRect());
    return texts.filter((text, i) => boxes.some((box, j) => j < i && area(box, boxes[i]))).map(where);
  });
  const aside = [...document.querySelectorAll(".scroll > svg")].filter(shown).flatMap(svg => {
    const frame = svg.parentElement.getBoundingClientRect();
    const drawn = [...svg.querySelectorAll("rect, text")].map(e => e.getBoundingClientRect().left);
    return drawn.length && Math.min(...drawn) > frame.left + svg.parentElement.scrollLeft + frame.width / 4 ? [where(svg)] : [];
  });

  // Lines that say the same, one after the other, which could be one.
  const MOST_ALIKE = 5;
  const said = line => (line.cells ? line.cells[0] : line).textContent.trim().replace(/\s+/g, " ");
  const walls = [...document.querySelectorAll("tbody, ol, ul")].filter(shown).flatMap(list => {
    const lines = [...list.children].map(said);
    return lines.filter((line, i) => line && i >= MOST_ALIKE && lines.slice(i - MOST_ALIKE, i).every(other => other === line))
      .slice(0, 1).map(line => where(list).split(":")[0] + ": " + line.slice(0, 60));
  });

  const headings = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].filter(shown);
  const level = heading => Number(heading.tagName[1]);
  const jumps = headings.filter((h, i) => level(h) > (i ? level(headings[i - 1]) : 0) + 1).map(where);

  const name = e => (e.getAttribute("aria-label") || e.textContent || e.title || "").trim() ||
    (e.getAttribute("aria-labelledby") || "").split(/\s+/).map(id => document.getElementById(id)?.textContent || "").join("") ||
    [...(e.labels || [])].map(label => label.textContent).join("");
  const unnamed = [...document.querySelectorAll("svg[role], button, a[href], input, select, [tabindex], [role=slider]")]
    .filter(e => shown(e) && !name(e)).map(where);

  const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
  const scrolling = ["auto", "scroll"];
  const scrolls = [...document.querySelectorAll("body *")].filter(e => shown(e) &&
    (e.scrollWidth > e.clientWidth + 1 && scrolling.includes(getComputedStyle(e).overflowX) ||
      e.scrollHeight > e.clientHeight + 1 && getComputedStyle(e).overflowY === "auto" && getComputedStyle(e).maxHeight !== "none"));
  return {
    overflow_px: root.scrollWidth - root.clientWidth,
    small: told.filter(e => size(e) < smallest - 0.01).map(e => size(e).toFixed(1) + " " + where(e)),
    spills, overlaps, aside, walls, pale, headings: jumps, unnamed,
    repeated_ids: ids.filter((id, i) => ids.indexOf(id) < i),
    unmarked: scrolls.filter(e => !e.matches("[tabindex], [tabindex] *")).map(where),
  };
}
