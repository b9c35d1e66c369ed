"use strict";
// Extras only: the page says everything without this script.

// Sort a table by a column: numbers by data-value where given, else by text.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.classList.add("clickable");
    heading.title = "sort";
    heading.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const rows = [...body.rows].sort((a, b) => key(a).localeCompare(key(b), "en", { numeric: true }));
      const numbers = rows.every((row) => key(row) !== "" && !Number.isNaN(Number(key(row))));
      if (numbers) rows.sort((a, b) => Number(key(a)) - Number(key(b)));
      body.append(...(up ? rows : rows.reverse()));
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    });
  });
}

// Zoom the timeline: its horizontal positions are percentages, so only the width changes.
const zoom = document.querySelector(".zoom");
if (zoom) {
  const view = document.querySelector(".gantt .view");
  const svg = view.querySelector("svg.time");
  let factor = 1;
  const set = (next, center) => {
    const at = (view.scrollLeft + center) / (view.clientWidth * factor);
    factor = Math.min(64, Math.max(1, next));
    svg.setAttribute("width", `${factor * 100}%`);
    view.scrollLeft = at * view.clientWidth * factor - center;
    number(view.clientWidth * factor);
  };
  // Microbatch numbers on every bar that has room for one at this width.
  const number = (pixels) => {
    svg.querySelectorAll("text.mb").forEach((text) => text.remove());
    for (const row of svg.querySelectorAll("svg[data-stage]")) {
      const units = row.viewBox.baseVal.width;
      for (const bar of row.querySelectorAll("rect.forward, rect.backward")) {
        const [x, width] = [bar.x.baseVal.value / units, bar.width.baseVal.value / units];
        if (width * pixels < 15) continue;
        const text = document.createElementNS(svg.namespaceURI, "text");
        text.setAttribute("class", "mb");
        text.setAttribute("x", `${(x + width / 2) * 100}%`);
        text.setAttribute("y", row.y.baseVal.value + 14);
        text.textContent = bar.textContent.match(/\d+/)?.[0] ?? "";
        svg.append(text);
      }
    }
  };
  zoom.hidden = false;
  zoom.addEventListener("click", (event) => {
    const step = event.target.dataset.zoom;
    if (step !== undefined) set(Number(step) ? factor * Number(step) : 1, view.clientWidth / 2);
  });
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    set(factor * (event.deltaY < 0 ? 1.25 : 0.8), event.clientX - view.getBoundingClientRect().left);
  }, { passive: false });
}
