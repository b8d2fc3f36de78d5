"use strict";
(function () {
  const charts = new Map(JSON.parse(document.getElementById("charts").textContent).map((chart) => [chart.key, chart]));
  const isTouched = matchMedia("(pointer: coarse)").matches;

  // Colours are names of variables of the style sheet: light and dark are one chart.
  function resolved(value, style) {
    if (typeof value === "string" && value.startsWith("var(--")) {
      return style.getPropertyValue(value.slice(4, -1)).trim();
    }
    if (Array.isArray(value)) return value.map((inner) => resolved(inner, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolved(inner, style)]));
    }
    return value;
  }

  function axis(own, style) {
    const color = style.getPropertyValue("--grid").trim();
    const title = { ...own.title, standoff: 10 };
    return { automargin: true, gridcolor: color, zerolinecolor: color, linecolor: color, ...own, title };
  }

  function draw(place) {
    const chart = charts.get(place.dataset.chart);
    const style = getComputedStyle(document.documentElement);
    const own = resolved(chart.layout, style);
    const layout = {
      hovermode: "x",
      ...own,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: style.getPropertyValue("--text").trim() },
      margin: { l: 8, r: 8, t: 10, b: 8 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemwidth: 30 },
      hoverlabel: { align: "left" },
      dragmode: isTouched ? false : "zoom", // a finger scrolls the page
      xaxis: axis(own.xaxis, style),
      yaxis: axis(own.yaxis, style),
    };
    const options = {
      responsive: true,
      displaylogo: false,
      displayModeBar: isTouched ? false : "hover",
      modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
    };
    Plotly.react(place, resolved(chart.traces, style), layout, options);
    place.dataset.drawn = "yes";
  }

  // Drawn once they come near: a page of many charts opens at once.
  const places = [...document.querySelectorAll("[data-chart]")];
  const near = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
      near.unobserve(entry.target);
      draw(entry.target);
    }),
    { rootMargin: "400px" }
  );
  places.forEach((place) => near.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    places.filter((place) => place.dataset.drawn).forEach(draw);
  });
  addEventListener("beforeprint", () => places.filter((place) => !place.dataset.drawn).forEach(draw));
})();
