// Draws the charts that the page declares as data, sorts and filters its tables, and copies its command.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const printing = window.matchMedia("print");
  const PAPER = 520; // pixels, of a chart on paper; the style sheet makes it half a page wide
  const WIDE = 520; // pixels, from which on labels of rows stand beside the marks
  const LETTER = 6.4; // pixels, about the width of one at 12 pixels
  const COVERS = 14; // pixels between two dots from which on the number of each can be read

  const rowLabels = (rows) =>
    Plot.text(rows, { y: (row) => row, text: (row) => row, frameAnchor: "left", textAnchor: "start", dy: -17, fill: "var(--dim)", stroke: "var(--panel)", strokeWidth: 5 });

  // Ticks such as 20ms or 1.5GB: the unit of the scale behind d3's prefix. Of a logarithmic scale few have a label.
  function scaled({ suffix, ...scale }, width) {
    if (!suffix && scale.tickFormat !== "~g" && scale.type !== "log") return scale;
    const leading = width < WIDE ? [1, 2, 5] : [1, 2, 3, 5];
    const told = (value) => scale.type !== "log" || leading.includes(Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9)));
    const words = (value) => (suffix ? Plot.format("~s")(value) + suffix : Plot.format(scale.tickFormat ?? "~g")(value));
    return { ...scale, tickFormat: (value) => (told(value) ? words(value) : "") };
  }

  function layout(chart, width) {
    const rows = chart.rows.length;
    if (!rows) return { height: chart.height ?? 300, marginLeft: 56, y: { labelArrow: "none", ...scaled(chart.y, width) } };
    const longest = Math.max(...chart.rows.map((row) => row.length)) * LETTER + 18;
    const beside = width >= WIDE && longest < width * 0.45;
    return {
      height: rows * (beside ? 25 : 42) + 64,
      marginLeft: beside ? longest : 12,
      y: { label: null, domain: chart.rows, padding: beside ? 0.3 : 0.55, ...(beside ? { tickSize: 0 } : { axis: null }), ...chart.y },
      labels: beside ? [] : [rowLabels(chart.rows)],
    };
  }

  // Points of which one covers the next, by the scales of what was drawn.
  function heaped(svg, points) {
    const [across, up] = ["x", "y"].map((name) => svg.scale(name).apply);
    const heaps = [];
    for (const each of points) {
      const place = { ...each, left: across(each.x), top: up(each.y) };
      const near = heaps.filter((heap) => heap.some((other) => Math.hypot(other.left - place.left, other.top - place.top) < COVERS));
      for (const heap of near) heaps.splice(heaps.indexOf(heap), 1);
      heaps.push([...near.flat(), place]);
    }
    return heaps;
  }
  function numbers(svg, points) {
    const heaps = heaped(svg, points);
    const alone = heaps.filter((heap) => heap.length === 1).flat();
    const above = heaps.filter((heap) => heap.length > 1).map((heap) => ({
      ...heap.reduce((highest, each) => (each.top < highest.top ? each : highest)),
      number: heap.map((each) => each.number).join("\n"),
    }));
    const look = { x: "x", y: "y", text: "number", fontSize: 11 };
    return [
      ...[...new Set(alone.map((each) => each.ink))].map((fill) => Plot.text(alone.filter((each) => each.ink === fill), { ...look, fill })),
      Plot.text(above, { ...look, fill: "var(--ink)", fontWeight: "bold", lineAnchor: "bottom", dy: -11 }),
    ];
  }

  // One hint at a time, that of the nearest point of all marks.
  function hints(chart) {
    const points = chart.marks.flatMap(({ data, options }) => {
      const [x, y] = [options.x ?? options.x2, options.y ?? options.y2];
      return options.title && x && y ? data.map((each) => ({ x: each[x], y: each[y], hint: each[options.title] })) : [];
    });
    const look = { fill: "var(--paper)", stroke: "var(--grey)", fontSize: 12, lineHeight: 1.3, lineWidth: 30, maxRadius: 30 };
    return Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: "hint", ...look }));
  }

  function draw(figure) {
    const chart = charts[figure.dataset.chart];
    const width = printing.matches ? PAPER : figure.clientWidth;
    if (!chart || width < 40 || Number(figure.dataset.width) === width) return;
    figure.dataset.width = width;
    const { labels = [], ...places } = layout(chart, width);
    const drawn = chart.marks.filter((mark) => mark.kind !== "numbers");
    const marks = drawn.map(({ kind, data, options: { title, ...options } }) => Plot[kind](data, options));
    const ticks = { ticks: Math.max(3, Math.min(8, Math.floor((width - places.marginLeft) / 90))) };
    const plan = {
      ...places,
      width,
      marginRight: 18,
      marginTop: 24,
      marginBottom: 40,
      ariaLabel: figure.dataset.title,
      style: { fontSize: "12px", fontFamily: "inherit", background: "none" },
      x: { labelAnchor: "center", labelArrow: "none", insetLeft: 6, insetRight: 6, ...ticks, ...scaled(chart.x, width) },
      marks: [...marks, ...labels, hints(chart)],
    };
    let svg = Plot.plot(plan);
    const numbered = chart.marks.filter((mark) => mark.kind === "numbers").flatMap((mark) => mark.data);
    if (numbered.length) svg = Plot.plot({ ...plan, marks: [...marks, ...labels, ...numbers(svg, numbered), hints(chart)] });
    svg.setAttribute("role", "img");
    figure.replaceChildren(svg);
  }

  const figures = [...document.querySelectorAll("[data-chart]")];
  const drawAll = () => figures.forEach(draw);
  new ResizeObserver(drawAll).observe(document.body);
  printing.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", drawAll);
  window.addEventListener("afterprint", drawAll);
  document.querySelectorAll("details").forEach((each) => each.addEventListener("toggle", drawAll));
  drawAll();

  // Said beside the filter as long as the table has columns that the window does not show.
  document.querySelectorAll("[data-cut]").forEach((hint) => {
    const box = document.getElementById(hint.dataset.cut).parentElement;
    const tell = () => (hint.hidden = box.scrollLeft + box.clientWidth > box.scrollWidth - 2);
    new ResizeObserver(tell).observe(box);
    box.addEventListener("scroll", tell);
  });

  const sorted = (table) => table.tBodies[table.tBodies.length - 1]; // what stands before it stays there
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    const number = cell.dataset.value;
    return number === undefined ? cell.textContent.trim() : number === "" ? null : Number(number);
  };
  function order(first, second) {
    if (first === null || second === null) return 0;
    return typeof first === "number" && typeof second === "number" ? first - second : String(first).localeCompare(String(second));
  }
  function sort(table, head) {
    const way = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    table.querySelectorAll("th[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", way);
    const sign = way === "ascending" ? 1 : -1;
    const body = sorted(table);
    const rows = [...body.rows].map((row) => ({ row, value: valueOf(row, head.cellIndex) }));
    rows.sort((a, b) => (a.value === null) - (b.value === null) || sign * order(a.value, b.value)); // what has no number stays last
    body.append(...rows.map(({ row }) => row));
  }
  document.querySelectorAll("table[data-sortable]").forEach((table) => {
    table.querySelectorAll("thead th button").forEach((button) => button.addEventListener("click", () => sort(table, button.closest("th"))));
  });

  document.querySelectorAll("input[data-filters]").forEach((input) => {
    const table = document.getElementById(input.dataset.filters);
    const count = document.getElementById(`${input.dataset.filters}-count`);
    const things = count.textContent.split(" ").pop();
    input.closest("[hidden]")?.removeAttribute("hidden");
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = [...sorted(table).rows];
      rows.forEach((row) => (row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word))));
      count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} ${things}`;
    });
  });

  document.querySelectorAll("button[data-copies]").forEach((button) => {
    const said = button.textContent;
    button.hidden = false;
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copies);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(source); // without the right to the clipboard: marked, to be copied by hand
        button.textContent = "Marked: copy it";
      }
      setTimeout(() => (button.textContent = said), 2000);
    });
  });
})();
