// The timeline: a view of the step that zooms and pans. Its bars are paths in units of a millionth of the step, which a
// view stretches by the viewBox; names on bars and the outline of the one that is chosen are laid over them.
for (const area of document.querySelectorAll(".timeline-area")) {
  const figure = area.querySelector(".timeline");
  const UNITS = 1e6, NARROWEST = 20, LOWEST = 12;  // LOWEST: of lanes that have room for names
  const data = unpack(JSON.parse(figure.querySelector(".timeline-data").textContent));
  const body = figure.querySelector(".timeline-body"), told = figure.querySelector(".timeline-told");
  const ticks = figure.querySelector(".timeline-ticks"), shown = figure.querySelector(".timeline-view");
  const table = area.querySelector(".timeline-table");
  const choice = table.querySelector("select");
  let from = 0, length = UNITS, chosen = null, waiting = false;

  // Every lane's bars as {start, stop, word, bytes}, by time.
  const rows = [...body.querySelectorAll(".timeline-row")].map((element, number) => {
    const plot = element.querySelector(".timeline-plot"), svg = plot.querySelector("svg");
    const overlay = plot.appendChild(document.createElement("div"));
    overlay.className = "timeline-labels";
    overlay.ariaHidden = "true";
    const lanes = data.rows[number].lanes.map(coded => {
      const bars = [];
      for (let i = 0, before = 0; i < coded.length; i += 4) {
        const start = before + coded[i], stop = before = start + coded[i + 1];
        bars.push({ start, stop, word: coded[i + 2], bytes: coded[i + 3] });
      }
      return bars;
    });
    return { plot, svg, overlay, lanes, places: data.rows[number].places, name: data.rows[number].name };
  });

  // ---- numbers as units.py prints them
  const digits = value => value >= 99.95 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 9.995 ? 1 : 2);
  const prefixed = (value, units) => {
    const [factor, unit] = units.find(([factor]) => value >= factor * 0.9995) || units.at(-1);
    return value ? digits(value / factor) + "\u00a0" + unit : "0\u00a0" + units[0][1];
  };
  const seconds = units => prefixed(units / UNITS * data.step_s, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
  const size = bytes => bytes < 999.5 ? bytes + "\u00a0B" : prefixed(bytes, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]);
  const lasts = bar => `${seconds(bar.stop - bar.start)}, from ${seconds(bar.start)} to ${seconds(bar.stop)}`;

  // ---- what is in view
  const look = (start, span) => {
    length = Math.min(UNITS, Math.max(NARROWEST, span));
    from = Math.min(UNITS - length, Math.max(0, start));
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
  };
  const zoom = (factor, around) => look(around - (around - from) * factor, length * factor);
  const place = units => (units - from) / length;  // of the plot's width

  // The first bar of a lane that ends after a moment.
  const after = (bars, moment) => {
    let low = 0, high = bars.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (bars[middle].stop > moment) high = middle; else low = middle + 1;
    }
    return low;
  };
  const inView = bars => {
    const found = [];
    for (let i = after(bars, from); i < bars.length && bars[i].start < from + length; i++) found.push(bars[i]);
    return found;
  };

  const draw = () => {
    waiting = false;
    const width = rows[0].plot.clientWidth;
    for (const row of rows) {
      row.svg.setAttribute("viewBox", `${from} 0 ${length} ${row.plot.clientHeight}`);
      row.overlay.replaceChildren(...row.lanes.flatMap((bars, lane) => labels(bars, row.places[lane], width)));
    }
    mark();
    drawTicks(width);
    shown.textContent = length === UNITS ? `the whole step, ${seconds(UNITS)}`
      : `${seconds(from)} to ${seconds(from + length)} of ${seconds(UNITS)}`;
    fillTable();
  };
  const labels = (bars, [top, height], width) => inView(bars).flatMap(bar => {
    const left = Math.max(0, place(bar.start)), share = Math.min(1, place(bar.stop)) - left;
    if (share * width < 3) return [];
    const label = document.createElement("span"), short = data.words[bar.word][1];
    label.className = "onbar";
    label.style.cssText = `left:${left * 100}%;width:${share * 100}%;top:${top}px;height:${height}px`;
    if (height >= LOWEST && share * width > short.length * 7.6 + 6) label.textContent = short;
    return [label];
  });
  const drawTicks = width => {
    const rough = length / Math.max(2, width / 130) / UNITS * data.step_s, power = 10 ** Math.floor(Math.log10(rough));
    const between = [1, 2, 5, 10].map(f => f * power).find(step => step >= rough) / data.step_s * UNITS;
    const marks = [];
    for (let at = Math.ceil(from / between - 1e-9); at * between <= from + length + 1e-6; at++) {
      const mark = document.createElement("span"), share = place(at * between);
      mark.style.left = `${share * 100}%`;
      mark.textContent = seconds(at * between);
      if (share * width > width - 44) mark.className = "last";
      marks.push(mark);
    }
    ticks.replaceChildren(...marks);
  };

  // ---- the chosen bar: {row, lane, at}
  const outline = document.createElement("span");
  outline.className = "timeline-chosen";
  const barOf = which => rows[which.row].lanes[which.lane][which.at];
  const mark = () => {
    if (!chosen) return outline.remove();
    const bar = barOf(chosen), [top, height] = rows[chosen.row].places[chosen.lane];
    const left = Math.max(-0.01, place(bar.start)), right = Math.min(1.01, place(bar.stop));
    outline.style.cssText = `left:${left * 100}%;width:max(3px,${Math.max(0, right - left) * 100}%);top:${top}px;height:${height}px`;
    outline.hidden = right < left;
    rows[chosen.row].overlay.append(outline);
  };
  const choose = which => {
    if (chosen && which && chosen.row === which.row && chosen.lane === which.lane && chosen.at === which.at) return;
    chosen = which;
    mark();
    if (!which) return;
    const bar = barOf(which), [kind, short, what] = data.words[bar.word];
    const how = kind === "compute" ? "" : ` (${short}${bar.bytes ? ", " + size(bar.bytes) + " a rank" : ""})`;
    told.textContent = `${rows[which.row].name}: ${what}${how}. ${lasts(bar)}.`;
  };
  const barAt = (row, lane, moment, slack) => {
    const bars = rows[row].lanes[lane], at = after(bars, moment - slack);
    return at < bars.length && bars[at].start <= moment + slack ? { row, lane, at } : null;
  };
  const under = event => {
    const row = rows.findIndex(row => row.plot.contains(event.target));
    if (row < 0) return null;
    const box = rows[row].plot.getBoundingClientRect();
    const lane = Math.max(0, rows[row].places.findLastIndex(([top]) => event.clientY - box.top >= top));
    return barAt(row, lane, momentOf(event), 3 / box.width * length);
  };
  const momentOf = event => {
    const box = rows[0].plot.getBoundingClientRect();
    return from + (event.clientX - box.left) / box.width * length;
  };

  // ---- mouse and fingers
  const fingers = new Map();
  let moved = false;
  body.addEventListener("pointerdown", event => {
    if (event.button || !event.target.closest(".timeline-plot")) return;
    fingers.set(event.pointerId, event);
    moved = false;
  });
  body.addEventListener("pointermove", event => {
    const width = rows[0].plot.clientWidth, last = fingers.get(event.pointerId);
    if (!last) return fingers.size || choose(under(event) || chosen);
    const others = [...fingers.values()].filter(finger => finger !== last);
    if (others.length) {
      const apart = Math.max(10, Math.abs(last.clientX - others[0].clientX));
      zoom(apart / Math.max(10, Math.abs(event.clientX - others[0].clientX)), momentOf(others[0]));
    } else if (moved || Math.abs(event.clientX - last.clientX) > 3) {
      if (!moved) body.setPointerCapture(event.pointerId);
      moved = true;
      look(from - (event.clientX - last.clientX) / width * length, length);
    } else return;
    fingers.set(event.pointerId, event);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    body.addEventListener(end, event => {
      if (fingers.delete(event.pointerId) && !moved && end === "pointerup") choose(under(event) || chosen);
    });
  }
  body.addEventListener("dblclick", event => {
    const which = under(event);
    if (!which) return zoom(0.5, momentOf(event));
    const { start, stop } = barOf(which);
    look(start - 0.25 * (stop - start), 1.5 * (stop - start));
  });
  body.addEventListener("wheel", event => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY / 200), momentOf(event));
    else if (length < UNITS && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) {
      look(from + (event.deltaX || event.deltaY) / rows[0].plot.clientWidth * length, length);
    } else return;
    event.preventDefault();
  }, { passive: false });

  // ---- keyboard and buttons
  const middle = () => {
    const bar = chosen && barOf(chosen);
    return bar && bar.stop > from && bar.start < from + length ? (bar.start + bar.stop) / 2 : from + length / 2;
  };
  const views = {
    in: () => zoom(0.5, middle()), out: () => zoom(2, middle()),
    left: () => look(from - length / 3, length), right: () => look(from + length / 3, length),
    whole: () => look(0, UNITS), end: () => look(data.end, UNITS - data.end),
  };
  figure.querySelector(".timeline-tools").addEventListener("click", event => views[event.target.dataset.view]?.());
  const step = (rowStep, barStep) => {
    if (!chosen) {
      const row = rows.findIndex(row => row.lanes.some(bars => bars.length));
      if (row >= 0) choose({ row, lane: rows[row].lanes.findIndex(bars => bars.length), at: 0 });
      return;
    }
    const bar = barOf(chosen);
    if (barStep) {
      const at = chosen.at + barStep;
      if (at >= 0 && at < rows[chosen.row].lanes[chosen.lane].length) choose({ ...chosen, at });
    } else {
      const lines = rows.flatMap((row, number) => row.lanes.map((bars, lane) => ({ row: number, lane, bars })));
      let line = lines.findIndex(({ row, lane }) => row === chosen.row && lane === chosen.lane) + rowStep;
      while (lines[line] && !lines[line].bars.length) line += rowStep;
      const next = lines[line];
      if (next) choose({ row: next.row, lane: next.lane, at: Math.min(next.bars.length - 1, after(next.bars, bar.start)) });
    }
    const { start, stop } = barOf(chosen);
    if (start < from || stop > from + length) look((start + stop) / 2 - length / 2, length);
  };
  const keys = {
    ArrowLeft: () => step(0, -1), ArrowRight: () => step(0, 1), ArrowUp: () => step(-1, 0), ArrowDown: () => step(1, 0),
    "+": views.in, "=": views.in, "-": views.out, Home: views.whole, 0: views.whole,
    End: () => views[data.end === null ? "right" : "end"](),
  };
  body.addEventListener("keydown", event => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  // ---- the same as a table
  const MOST = 100;
  const fillTable = () => {
    if (!table.open) return;
    const row = rows[choice.value];
    const bars = row.lanes.flatMap(inView).sort((one, other) => one.start - other.start), groups = [];
    for (const bar of bars) {  // those that follow each other in the same words share a line
      const last = groups.at(-1);
      if (last && last[0].word === bar.word) last.push(bar); else groups.push([bar]);
    }
    const sum = (group, of) => group.reduce((before, bar) => before + of(bar), 0);
    table.querySelector("tbody").replaceChildren(...groups.slice(0, MOST).map(group => {
      const line = document.createElement("tr"), [kind, short, what] = data.words[group[0].word];
      const times = group.length > 1 ? `${group.length} × ` : "", bytes = sum(group, bar => bar.bytes);
      const cells = [times + (kind === "compute" ? what : `${what} (${short})`), seconds(group[0].start),
        seconds(sum(group, bar => bar.stop - bar.start)), bytes ? size(bytes) : ""];
      cells.forEach((text, number) => {
        const cell = line.insertCell();
        cell.textContent = text;
        if (number) cell.className = "number";
      });
      return line;
    }));
    table.querySelector(".timeline-more").textContent =
      groups.length > MOST ? `and ${(groups.length - MOST).toLocaleString("en")} more: zoom in to see them` : "";
    table.dispatchEvent(new Event("filled", { bubbles: true }));
  };
  table.addEventListener("toggle", fillTable);
  choice.addEventListener("change", fillTable);

  body.tabIndex = 0;
  body.setAttribute("role", "application");
  body.setAttribute("aria-label", `${figure.getAttribute("aria-label")}. Arrow keys go from bar to bar, plus and minus zoom.`);
  new ResizeObserver(() => look(from, length)).observe(rows[0].plot);
  draw();
}
