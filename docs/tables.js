// Tables of results sort by a click on a heading, and long ones show only the rows that hold a text.
(() => {
  const FEWEST = 8; // rows, from which on a table can be filtered
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = parseFloat(text.replace(/[,\s](?=\d{3})/g, "").replace("−", "-"));
    return Number.isNaN(number) ? text.toLowerCase() : number;
  };
  // What is no number comes after all numbers, in both directions.
  const before = (a, b, turn) =>
    typeof a === typeof b ? turn * (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;

  const sortable = (table) => {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.tabIndex = 0;
      head.title = "sort";
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "descending";
        table.querySelectorAll("[aria-sort]").forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "ascending" : "descending");
        const turn = down ? 1 : -1;
        body.append(...[...body.rows].sort((a, b) => before(value(a, column), value(b, column), turn)));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  };

  const filterable = (table) => {
    const field = document.createElement("input");
    field.type = "search";
    field.className = "rows";
    field.placeholder = "rows with …";
    field.setAttribute("aria-label", "Show only rows with this text");
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase();
      for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
    table.before(field);
  };

  for (const table of document.querySelectorAll("article table:not([class])")) {
    const rows = table.tHead && table.tBodies.length ? [...table.tBodies[0].rows] : [];
    // A row without a first cell belongs to the one above it.
    if (!rows.length || rows.some((row) => !row.cells[0].textContent.trim())) continue;
    sortable(table);
    if (rows.length >= FEWEST) filterable(table);
  }
})();
