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

// What scrolls sideways says so, and is reached by keyboard.
{
  const areas = document.querySelectorAll(".scroll");
  const named = area => {
    const heading = area.closest("article, section")?.querySelector("h2, h3");
    return `${area.querySelector("caption")?.textContent || heading?.textContent || "Table"}, scrolls sideways`;
  };
  for (const area of areas) {
    const hint = document.createElement("p");
    hint.className = "scroll-hint";
    hint.ariaHidden = "true";
    hint.textContent = "⟷ scrolls sideways";
    area.after(hint);
  }
  const mark = () => {
    const wide = [...areas].map(area => area.scrollWidth > area.clientWidth + 1);
    areas.forEach((area, number) => {
      area.classList.toggle("scrolls", wide[number]);
      for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", named(area)]]) {
        if (wide[number]) area.setAttribute(name, value); else area.removeAttribute(name);
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
