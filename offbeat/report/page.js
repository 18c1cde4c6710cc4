"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const coarse = matchMedia("(pointer: coarse)").matches;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Set();
  let axis = "time";
  let printing = false;

  // Colours are names in the figures: a theme's own are put in their place.
  function tone(name) {
    const [key, alpha] = name.slice(1).split("/");
    const value = getComputedStyle(root).getPropertyValue("--" + key).trim();
    if (!alpha) return value;
    const parts = [1, 3, 5].map((at) => parseInt(value.slice(at, at + 2), 16));
    return `rgba(${parts.join(",")},${alpha})`;
  }
  const COLOURED = new Set(["color", "fgcolor", "fillcolor", "bgcolor", "bordercolor", "gridcolor", "linecolor",
    "colorscale"]);
  function painted(value, key) {
    if (typeof value === "string") return COLOURED.has(key) && value[0] === "@" ? tone(value) : value;
    if (Array.isArray(value)) {
      if (key === "colorscale") return value.map(([at, name]) => [at, tone(name)]);
      const first = value[0];
      return first !== null && typeof first === "object" ? value.map((one) => painted(one, key)) : value;
    }
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, painted(one, name)]));
  }

  function decades(data) {
    let low = Infinity, high = 0;
    for (const trace of data) {
      for (const y of trace.y) if (y > 0) { low = Math.min(low, y); high = Math.max(high, y); }
    }
    return Math.log10(high / low);
  }

  // Names above the phases: in full, in short, or not at all where there is no room.
  function fitting(notes, room) {
    const fits = (text, part) => text.length * 6.6 < part * room;
    return notes.flatMap(({ short, part, ...note }) => {
      if (part === undefined || fits(note.text, part)) return [note];
      return fits(short, part) ? [{ ...note, text: short }] : [];
    });
  }

  // The figures' texts are escaped, as plotly takes them for a kind of HTML.
  function shortened(text, most) {
    const marks = [["<", "&lt;"], [">", "&gt;"], ["&", "&amp;"]];
    const plain = marks.reduce((whole, [mark, name]) => whole.replaceAll(name, mark), text);
    if (plain.length <= most) return text;
    return marks.reverse().reduce((whole, [mark, name]) => whole.replaceAll(mark, name), plain.slice(0, most - 1) + "…");
  }

  const narrow = (box) => box.clientWidth < 560;

  function draw(box) {
    const name = box.dataset.figure, one = figures[name];
    const data = painted(one.data), layout = painted(one.layout);
    const choice = one.axes[axis];
    layout.xaxis = { ...layout.xaxis };
    let notes = layout.annotations;
    if (choice) {
      data.forEach((trace, i) => { trace.x = choice.x[i]; });
      layout.xaxis.title = { ...layout.xaxis.title, text: choice.title };
      layout.shapes = painted(choice.shapes);
      notes = painted(choice.annotations);
    }
    if (notes) layout.annotations = fitting(notes, box.clientWidth - 90);
    const log = box.closest("figure").querySelector("[data-log]");
    if (log) {
      layout.yaxis = { ...layout.yaxis, type: log.checked ? "log" : "linear" };
      if (log.checked) Object.assign(layout.yaxis, { tickformat: "~g", dtick: decades(data) > 3 ? 1 : "D2" });
    }
    layout.height = layout.height || (narrow(box) ? 320 : 380);
    layout.width = Math.max(box.clientWidth, 200);
    box.style.minHeight = layout.height + "px";
    layout.uirevision = name + axis;
    if (narrow(box)) {
      layout.font = { ...layout.font, size: 11 };
      layout.margin = { ...layout.margin, l: 46, r: 6 };
      data.forEach((trace) => { if (trace.name) trace.name = shortened(trace.name, 40); });
    }
    if (!choice && layout.legend && narrow(box) && layout.legend.y < 0) layout.legend = { ...layout.legend, y: layout.legend.y - 0.03 };
    if (coarse) layout.dragmode = false;  // a finger that goes over a plot scrolls the page
    drawn.add(box);
    return Plotly.react(box, data, layout, {
      displaylogo: false,
      scrollZoom: false,
      typesetMath: false,
      displayModeBar: coarse || printing ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    });
  }

  for (const box of document.querySelectorAll("figure.plot .canvas")) {
    const one = figures[box.dataset.figure], log = box.closest("figure").querySelector("[data-log]");
    if (log) log.checked = (one.layout.yaxis || {}).type === "log";
  }

  // A plot is drawn when it comes near the window: a long report opens at once.
  const near = new IntersectionObserver((seen) => {
    for (const one of seen) if (one.isIntersecting) { near.unobserve(one.target); draw(one.target); }
  }, { rootMargin: "400px" });
  document.querySelectorAll(".canvas").forEach((box) => near.observe(box));

  const redraw = () => { for (const box of drawn) if (box.clientWidth) draw(box); };

  // Theme: the reader's system's, until the button says otherwise.
  const button = document.getElementById("theme");
  let chosen = null;
  try { chosen = localStorage.getItem("offbeat-theme"); } catch (error) { /* a file may have no storage */ }
  function theme() {
    const dark = !printing && (chosen ? chosen === "dark" : prefersDark.matches);
    root.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${dark ? "light" : "dark"} colours`);
  }
  theme();
  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("offbeat-theme", chosen); } catch (error) { /* then it holds for this page */ }
    theme();
    redraw();
  });
  prefersDark.addEventListener("change", () => { theme(); redraw(); });

  for (const radio of document.querySelectorAll("input[name=axis]")) {
    radio.addEventListener("change", () => {
      axis = radio.value;
      for (const box of drawn) if (figures[box.dataset.figure].axes[axis]) draw(box);
    });
  }

  // Zoom by buttons: with a keyboard, and where fingers scroll.
  document.addEventListener("click", (event) => {
    const pressed = event.target.closest("[data-zoom]");
    if (!pressed) return;
    const box = pressed.closest("figure").querySelector(".canvas"), one = figures[box.dataset.figure];
    if (!drawn.has(box)) draw(box);
    const how = pressed.dataset.zoom, [from, to] = box._fullLayout.xaxis.range.map(Number), wide = to - from;
    if (how === "all") {
      const range = (one.layout.xaxis || {}).range;
      const change = range ? { "xaxis.range": [...range] } : { "xaxis.autorange": true };
      if ((one.layout.yaxis || {}).range && one.axes[axis]) change["yaxis.autorange"] = true;
      Plotly.relayout(box, change);
      return;
    }
    const ranges = {
      in: [from + wide / 4, to - wide / 4], out: [from - wide / 2, to + wide / 2],
      left: [from - wide / 3, to - wide / 3], right: [from + wide / 3, to + wide / 3],
    };
    Plotly.relayout(box, { "xaxis.range": ranges[how] });
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-log]")) draw(event.target.closest("figure").querySelector(".canvas"));
  });

  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 120); });

  // On paper: light, all plots of what is open, as wide as a page.
  addEventListener("beforeprint", () => {
    printing = true;
    root.dataset.printing = "";
    theme();
    for (const box of document.querySelectorAll(".canvas")) {
      if (!box.closest("details:not([open])")) {
        box.style.maxWidth = "680px";
        near.unobserve(box);
        draw(box);
      }
    }
  });
  addEventListener("afterprint", () => {
    printing = false;
    delete root.dataset.printing;
    for (const box of document.querySelectorAll(".canvas")) box.style.maxWidth = "";
    theme();
    redraw();
  });

  // A link to a run opens it.
  function open() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = target && target.closest("details");
    if (details) details.open = true;
  }
  addEventListener("hashchange", open);
  open();
})();
