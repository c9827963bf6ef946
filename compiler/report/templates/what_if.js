// What if: a choice among the rows that were priced. One thing is changed at a time, so one row is chosen in all.
{
  const form = document.querySelector(".choices");
  const figures = document.querySelector(".priced");
  const tables = [...document.querySelectorAll("table.changes")];

  const show = (row) => {
    for (const table of tables) {
      for (const other of table.tBodies[0].rows) other.classList.toggle("selected", other === row);
    }
    figures.replaceChildren(...[...row.querySelectorAll("[data-figure]")].map((cell) => {
      const figure = document.createElement("div");
      figure.className = "figure";
      const name = document.createElement("span");
      name.className = "name";
      name.textContent = cell.dataset.figure;
      const value = document.createElement("strong");
      value.textContent = cell.textContent.trim() || "–";
      figure.append(name, value);
      return figure;
    }));
  };

  const choice = (table, row) => {
    const label = document.createElement("label");
    const radio = document.createElement("input");
    radio.type = "radio";
    radio.name = table.dataset.dimension;
    radio.checked = row.classList.contains("chosen");
    radio.addEventListener("change", () => {
      // The others go back to what was compiled.
      for (const other of form.querySelectorAll("input")) {
        if (other.name !== radio.name) other.checked = other.dataset.plan === "yes";
      }
      show(row);
    });
    radio.dataset.plan = radio.checked ? "yes" : "no";
    label.append(radio, row.dataset.value);
    return label;
  };

  for (const table of tables) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 2) continue;
    const field = document.createElement("fieldset");
    const legend = document.createElement("legend");
    legend.textContent = table.dataset.title;
    field.append(legend, ...rows.map((row) => choice(table, row)));
    form.append(field);
  }
  form.hidden = figures.hidden = false;
  show(tables[0].querySelector("tr.chosen"));
}
