"use strict";
document.documentElement.classList.add("with-scripts");  // shows what works with them alone
// What all sections share: what is printed is unfolded, and folded again afterwards.
{
  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll("details:not([open])")];
    for (const details of unfolded) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of unfolded) details.open = false;
  });
}

// What scrolls says so, and is reached by keyboard.
{
  const areas = document.querySelectorAll(".scroll");
  const named = area => {
    const heading = area.closest("article, section")?.querySelector("h2, h3");
    return area.dataset.name || area.querySelector("caption")?.textContent || heading?.textContent || "Table";
  };
  const ways = area => !area.checkVisibility() ? "" : [  // what is folded says nothing
    ...(area.scrollWidth > area.clientWidth + 1 ? ["sideways"] : []),
    ...(area.matches(".tall") && area.scrollHeight > area.clientHeight + 1 ? ["up and down"] : []),
  ].join(", ");
  for (const area of areas) {
    const hint = document.createElement("p");
    hint.className = "scroll-hint";
    hint.ariaHidden = "true";
    area.after(hint);
  }
  const mark = () => {
    const scrolling = [...areas].map(ways);
    areas.forEach((area, number) => {
      const told = scrolling[number];
      area.classList.toggle("scrolls", told !== "");
      area.nextElementSibling.textContent = `${told === "sideways" ? "⟷" : told ? "↕" : ""} scrolls ${told}`;
      const label = `${named(area)}, scrolls ${told}`;
      for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", label]]) {
        if (told) area.setAttribute(name, value); else area.removeAttribute(name);
      }
    });
  };
  const sizes = new ResizeObserver(mark);
  for (const area of areas) sizes.observe(area);
  addEventListener("toggle", mark, true);
  addEventListener("filled", mark);
  mark();
}

// A line of a table that a link leads to is unfolded, with what stands beneath it.
{
  const unfold = () => {
    const line = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!line || line.tagName !== "TR") return;
    const beneath = line.nextElementSibling?.matches(".beneath") ? [line.nextElementSibling] : [];
    for (const row of [line, ...beneath]) for (const details of row.querySelectorAll("details")) details.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();
}
