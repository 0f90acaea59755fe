// Draws figures: `wide` or `narrow` by the place, light or dark by the reader's choice.
"use strict";
window.drawFigure = (div, { data, wide, narrow }, colours, { isNarrow, isDark }) => {
  // Only what is named a colour changes: a method may be called "white".
  const darkened = (value, name) => {
    if (typeof value === "string") return name.endsWith("color") ? (colours[value] ?? value) : value;
    if (Array.isArray(value)) return value.map((item) => darkened(item, name));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, darkened(inner, key)]));
  };
  const shown = structuredClone([data, isNarrow ? narrow : wide]);
  const [traces, { height, ...layout }] = isDark ? darkened(shown, "") : shown;
  div.style.height = `${height}px`; // a resized figure takes the height of its place, and forgets its own
  // Without a pointer that hovers, Plotly's bar would always lie on the titles of the panels.
  const displayModeBar = matchMedia("(hover: hover)").matches && "hover";
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar };
  return Plotly.newPlot(div, traces, layout, config);
};
(() => {
  const scripts = Array.from(document.querySelectorAll("script[data-figure]"));
  if (!scripts.length) return;
  if (!window.Plotly) {
    document.documentElement.classList.add("without-plotly");
    return;
  }
  const narrow = matchMedia("(max-width: 700px)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colours = JSON.parse(document.getElementById("dark-colours").textContent);
  const figures = scripts.map((script) => [document.getElementById(script.dataset.figure), JSON.parse(script.textContent)]);
  const draw = () => {
    for (const [div, figure] of figures) {
      if (div.offsetParent === null) continue; // hidden, as in print: it has no width
      drawFigure(div, figure, colours, { isNarrow: narrow.matches, isDark: dark.matches });
    }
  };
  narrow.addEventListener("change", draw);
  dark.addEventListener("change", draw);
  draw();
})();
