(() => {
  // Tables of the laboratory: a click on a heading sorts by it, the next the other way, the third as it was.
  const natural = new Intl.Collator("en", { numeric: true });
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], first = [...body.rows];
    const value = (row, at) => {
      const cell = row.cells[at];
      if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
      return cell.classList.contains("n") ? null : cell.textContent;
    };
    table.tHead.addEventListener("click", (event) => {
      const head = event.target.closest("th");
      if (!head || !event.target.closest("button")) return;
      const at = heads.indexOf(head), start = at === 0 ? "ascending" : "descending";
      const other = start === "ascending" ? "descending" : "ascending";
      const now = head.getAttribute("aria-sort"), next = now === "none" ? start : now === start ? other : "none";
      heads.forEach((each) => each.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", next);
      const order = first.slice();
      if (next !== "none") order.sort((a, b) => {
        const x = value(a, at), y = value(b, at);
        if (x === null || y === null) return (x === null) - (y === null);
        const way = typeof x === "number" && typeof y === "number" ? x - y : natural.compare(String(x), String(y));
        return next === "descending" ? -way : way;
      });
      body.append(...order);
    });
  }
})();
