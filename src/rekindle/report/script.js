"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const table = document.getElementById("table");
  const $ = (id) => document.getElementById(id);
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const draw = (tag, attributes, words) => {
    const element = document.createElementNS(document.querySelector("svg").namespaceURI, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (words !== undefined) element.textContent = words;
    return element;
  };
  const raised = (words) => {
    const [mantissa, power] = words.split("e");
    return `${mantissa}·10${[...String(Number(power))].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("")}`;
  };
  const shown = (value) => {
    if (value === undefined || value === null) return "";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
    const size = Math.abs(value);
    return size >= 1e5 || size < 1e-3 ? raised(value.toExponential(1)) : String(Number(value.toPrecision(3)));
  };

  const theme = $("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} mode`); };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
  dark.addEventListener("change", label);
  label();

  const copy = $("copy");
  if (copy && navigator.clipboard) {
    copy.hidden = false;
    copy.addEventListener("click", () => {
      navigator.clipboard.writeText(copy.parentElement.querySelector("code").textContent)
        .then(() => { copy.textContent = "Copied"; }, () => { copy.textContent = "Select and copy"; });
    });
  }
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; opened.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => { opened.forEach((d) => { d.open = false; }); });
  if (!table) return;

  const body = table.tBodies[0];
  const rows = [...body.rows].map((element) => ({
    element, at: Number(element.dataset.row), layer: data.layers[Number(element.dataset.row)], detail: null,
    role: element.cells[1].textContent, level: Number(element.dataset.level), changed: element.dataset.changed === "1",
  }));
  const places = new Map(rows.map((row) => [row.layer.name, row]));
  const heads = [...table.tHead.rows[0].cells];
  const cellOf = heads.map((head, at) => [head.querySelector("button"), at]).filter(([button]) => button).map(([, at]) => at);

  // Sorting
  const order = $("order");
  let sorted = { column: null, down: false };
  const valueOf = (row, cell) => {
    const found = row.element.cells[cell];
    if (found.dataset.v !== undefined) return Number(found.dataset.v);
    return found.classList.contains("n") ? null : found.textContent;
  };
  const natural = new Intl.Collator("en", { numeric: true });
  const sort = (column, down) => {
    sorted = { column, down };
    const cell = column === null ? null : cellOf[column];
    const list = rows.slice();
    if (cell === null) list.sort((a, b) => a.at - b.at);
    else {
      const keys = new Map(list.map((row) => [row, cell === 0 ? row.layer.name : valueOf(row, cell)]));
      list.sort((a, b) => {
        const x = keys.get(a), y = keys.get(b);
        if (x === null || y === null) return (x === null) - (y === null) || a.at - b.at;
        const way = typeof x === "number" && typeof y === "number" ? x - y : natural.compare(String(x), String(y));
        return (down ? -way : way) || a.at - b.at;
      });
    }
    heads.forEach((head, at) => { if (head.hasAttribute("aria-sort")) head.setAttribute("aria-sort", at === cell ? (down ? "descending" : "ascending") : "none"); });
    order.value = column === null ? "" : String(column);
    const all = document.createDocumentFragment();
    for (const row of list) { all.append(row.element); if (row.detail) all.append(row.detail); }
    body.append(all);
  };
  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-sort]");
    if (!button) return;
    const column = Number(button.dataset.sort), words = column < 2;
    if (sorted.column !== column) sort(column, !words);
    else if (sorted.down === !words) sort(column, words);
    else sort(null, false);
  });
  order.addEventListener("change", () => { if (order.value === "") sort(null, false); else sort(Number(order.value), Number(order.value) > 1); });

  // Filtering
  const filter = $("filter"), role = $("role"), marked = $("marked"), changed = $("changed"), count = $("count");
  const matcher = (words) => {
    const text = words.trim().toLowerCase();
    if (!text) return () => true;
    if (/[*?]/.test(text)) {
      const pattern = new RegExp("^" + text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".") + "$");
      return (row) => pattern.test(row.layer.name.toLowerCase());
    }
    return (row) => row.layer.name.toLowerCase().includes(text) || row.role.toLowerCase().includes(text);
  };
  const refresh = () => {
    const matches = matcher(filter.value);
    let left = 0;
    for (const row of rows) {
      const keep = matches(row) && (!role.value || row.role === role.value) && (!marked || !marked.checked || row.level > 0) && (!changed || !changed.checked || row.changed);
      row.element.classList.toggle("gone", !keep);
      if (row.detail) row.detail.classList.toggle("gone", !keep);
      left += keep;
    }
    count.textContent = left === rows.length ? `${left} layers` : `${left} of ${rows.length} layers`;
  };
  refresh();
  for (const tool of [filter, role, marked, changed]) if (tool) for (const event of ["input", "change"]) tool.addEventListener(event, refresh);
  filter.form.addEventListener("submit", (event) => event.preventDefault());

  // One layer: its spectrum and every number
  const names = data.words.sides;
  const spectrum = (curves, log) => {
    const width = Math.max(300, Math.min(620, root.clientWidth - 40)), height = 250, left = 52, right = 12, top = 12, bottom = 34;
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    const lines = ["before", "after"].filter((which) => curves[which]);
    const k = Math.max(...lines.map((which) => curves[which].k));
    const all = lines.flatMap((which) => [...curves[which].mean, ...(curves[which].high || [])]);
    const positive = lines.flatMap((which) => curves[which].mean).filter((value) => value > 0);
    const high = Math.max(...all, 1e-12), low = log ? Math.max(Math.min(...positive), high * 1e-6) : 0;
    const scale = log ? (v) => Math.log10(Math.max(v, low) / low) / Math.max(Math.log10(high / low), 1e-9) : (v) => v / high;
    const y = (v) => height - bottom - (height - top - bottom) * Math.min(1, Math.max(0, scale(v)));
    const x = (at, points) => left + (width - left - right) * (points > 1 ? at / (points - 1) : 0.5);
    const steps = log ? [0, 1 / 3, 2 / 3, 1].map((share) => low * (high / low) ** share) : [0, 0.25, 0.5, 0.75, 1].map((share) => high * share);
    for (const value of steps) {
      svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
      svg.append(draw("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, shown(value)));
    }
    [1, Math.ceil(k / 4), Math.ceil(k / 2), Math.ceil(3 * k / 4), k].filter((v, at, list) => list.indexOf(v) === at).forEach((index) => {
      svg.append(draw("text", { x: left + (width - left - right) * (k > 1 ? (index - 1) / (k - 1) : 0.5), y: height - bottom + 16, "text-anchor": "middle" }, String(index)));
    });
    svg.append(draw("text", { x: left + (width - left - right) / 2, y: height - 3, "text-anchor": "middle" }, "singular value, largest first"));
    for (const which of lines) {
      const curve = curves[which], points = curve.mean.length;
      if (curve.low) {
        const there = curve.high.map((value, at) => `${x(at, points).toFixed(1)},${y(value).toFixed(1)}`);
        const back = curve.low.map((value, at) => `${x(at, points).toFixed(1)},${y(value).toFixed(1)}`).reverse();
        svg.append(draw("path", { class: `band ${which}`, d: `M${[...there, ...back].join(" L")}Z` }));
      }
      const values = points > 1 ? curve.mean : [curve.mean[0], curve.mean[0]];
      svg.append(draw("path", { class: which, d: "M" + values.map((value, at) => `${(points > 1 ? x(at, points) : at ? width - right : left).toFixed(1)},${y(value).toFixed(1)}`).join(" L") }));
    }
    const told = lines.map((which) => `${names[which]} from ${shown(curves[which].mean[0])} down to ${shown(curves[which].mean.at(-1))}`).join(", ");
    svg.setAttribute("aria-label", `Singular values ${told}`);
    return svg;
  };
  const chart = (curves) => {
    const box = make("div", { class: "chart" });
    const several = ["before", "after"].some((which) => curves[which] && curves[which].count > 1);
    const key = make("p", { class: "key" });
    for (const which of ["before", "after"]) if (curves[which]) key.append(make("span", {}, make("i", { class: which }), curves.before && curves.after ? names[which] : "singular values"));
    if (several) key.append(make("span", {}, `mean and range of ${(curves.before || curves.after).count} matrices`));
    const button = make("button", { type: "button", "aria-pressed": "false" }, "log scale");
    key.append(button);
    box.append(key, spectrum(curves, false));
    button.addEventListener("click", () => {
      const log = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(log));
      button.textContent = log ? "linear scale" : "log scale";
      box.lastChild.replaceWith(spectrum(curves, log));
    });
    return box;
  };
  const numbers = (layer) => {
    const list = make("tbody");
    const both = Object.keys(layer.after).length > 0;
    const line = (words, ...values) => {
      const name = make("th", { scope: "row" }, words[0]);
      if (words[1]) name.append(make("small", {}, words[1]));
      list.append(make("tr", {}, name, ...values.map((value) => make("td", { class: "n" }, shown(value)))));
    };
    for (const [key, words] of Object.entries(data.words.measures)) {
      if (layer.before[key] === undefined && layer.after[key] === undefined) continue;
      line(words, layer.before[key], ...(both ? [layer.after[key]] : []));
    }
    for (const [part, words] of [["change", data.words.changes], ["record", data.words.record]])
      for (const [key, told] of Object.entries(words)) if (layer[part][key] !== undefined) line(told, ...(both ? [""] : []), layer[part][key]);
    const head = both ? [make("thead", {}, make("tr", {}, make("td"), make("th", { scope: "col", class: "n" }, names.before), make("th", { scope: "col", class: "n" }, names.after)))] : [];
    return make("div", { class: "scroll" }, make("table", {}, ...head, list));
  };
  const toggle = (row, open) => {
    const button = row.element.querySelector(".open");
    if (open === undefined) open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    if (open && !row.detail) {
      const inside = make("div", { class: "inside" });
      for (const finding of row.layer.findings) {
        inside.append(make("p", { class: "said" }, make("span", { class: `flag ${finding.level}` }, finding.level), ` ${finding.text}. What helps: ${finding.remedy}.`));
      }
      if (row.layer.curves.before || row.layer.curves.after) inside.append(chart(row.layer.curves));
      inside.append(numbers(row.layer));
      row.detail = make("tr", { class: "detail", id: `layer-${row.at}`, role: "row" }, make("td", { colspan: String(heads.length), role: "cell" }, inside));
      button.setAttribute("aria-controls", row.detail.id);
    }
    if (row.detail) { row.detail.hidden = !open; row.element.after(row.detail); }
  };
  body.addEventListener("click", (event) => {
    const button = event.target.closest("button.open");
    if (button) toggle(rows[Number(button.closest("tr").dataset.row)]);
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-layer]");
    const row = link && places.get(link.dataset.layer);
    if (!row) return;
    filter.value = ""; role.value = "";
    if (marked) marked.checked = false;
    if (changed) changed.checked = false;
    refresh();
    toggle(row, true);
    row.element.scrollIntoView({ block: "center" });
    row.element.querySelector(".open").focus({ preventScroll: true });
    row.element.classList.remove("flash");
    requestAnimationFrame(() => row.element.classList.add("flash"));
  });
})();
