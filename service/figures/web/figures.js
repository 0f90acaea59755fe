// Draws the figures of a page: `wide` or `narrow` by its width, dark where the reader's screen is.
"use strict";
(() => {
  if (!window.Plotly) {
    document.documentElement.classList.add("without-plotly");
    return;
  }
  const config = { responsive: true, displaylogo: false };
  const narrow = matchMedia("(max-width: 700px)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colours = JSON.parse(document.getElementById("dark-colours").textContent);
  const figures = Array.from(document.querySelectorAll("script[data-figure]"), (script) => ({
    div: document.getElementById(script.dataset.figure),
    ...JSON.parse(script.textContent),
  }));

  // Only what is named a colour changes: a method may be called "white".
  const darkened = (value, name) => {
    if (typeof value === "string") return name.endsWith("color") ? (colours[value] ?? value) : value;
    if (Array.isArray(value)) return value.map((item) => darkened(item, name));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, darkened(inner, key)]));
  };
  const draw = () => {
    for (const { div, data, wide, narrow: stacked } of figures) {
      if (div.offsetParent === null) continue; // hidden, as in print: it has no width
      const shown = structuredClone([data, narrow.matches ? stacked : wide]);
      const [traces, { height, ...layout }] = dark.matches ? darkened(shown, "") : shown;
      div.style.height = `${height}px`; // a resized figure takes the height of its place, and forgets its own
      Plotly.newPlot(div, traces, layout, config);
    }
  };
  narrow.addEventListener("change", draw);
  dark.addEventListener("change", draw);
  draw();
})();
