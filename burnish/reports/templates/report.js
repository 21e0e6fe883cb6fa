"use strict";
(() => {
  const SVG = document.getElementById("plot").namespaceURI;
  const episodes = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  function make(name, attributes, parent) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node);
    return node;
  }

  function showTip(text, event) {
    tip.textContent = text;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 6))}px`;
    tip.style.top = `${Math.max(4, event.clientY - height - 12)}px`;
  }

  // values of a chart under the pointer: of every curve the point that is nearest along the steps
  for (const figure of document.querySelectorAll("[data-chart]")) {
    const lines = JSON.parse(figure.dataset.chart);
    const svg = figure.querySelector("svg");
    const cursor = make("line", { class: "cursor", y1: 12, y2: 208, visibility: "hidden" }, svg);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.viewBox.baseVal;
      const bounds = svg.getBoundingClientRect();
      const x = ((event.clientX - bounds.left) / bounds.width) * box.width;
      const y = ((event.clientY - bounds.top) / bounds.height) * box.height;
      const nearest = lines
        .map(({ label, marks }) => {
          const mark = marks.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
          return { label, mark, away: Math.abs(mark[1] - y) };
        })
        .sort((a, b) => a.away - b.away)
        .slice(0, 6);
      const at = nearest[0].mark[0];
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.setAttribute("visibility", "visible");
      showTip(nearest.map(({ label, mark }) => `${label}  ${mark[2]}`).join("\n"), event);
    });
    svg.addEventListener("pointerleave", () => {
      cursor.setAttribute("visibility", "hidden");
      tip.hidden = true;
    });
  }

  // cards: the film runs under the pointer
  for (const card of document.querySelectorAll("[data-episode]")) {
    const episode = episodes[card.dataset.episode];
    const film = card.querySelector(".film");
    let timer = null;
    const show = (frame) => {
      const { columns } = episode.clips[0];
      film.style.setProperty("--column", frame % columns);
      film.style.setProperty("--row", Math.floor(frame / columns));
    };
    if (film) {
      card.addEventListener("pointerenter", () => {
        const { frames, fps } = episode.clips[0];
        let frame = 0;
        clearInterval(timer);
        timer = setInterval(() => show(frame++ % frames), 1000 / fps);
      });
      card.addEventListener("pointerleave", () => {
        clearInterval(timer);
        show(episode.clips[0].frames - 1);
      });
    }
    card.addEventListener("click", () => open(episode, card));
  }

  const viewer = document.getElementById("viewer");
  const slider = document.getElementById("viewer-time");
  const play = document.getElementById("viewer-play");
  const now = document.getElementById("viewer-now");
  let shown = null; // { episode, draws, cursor }
  let started = null; // of the animation: clock [ms] and step
  viewer.addEventListener("close", () => pause());
  viewer.addEventListener("click", (event) => event.target === viewer && viewer.close());
  slider.addEventListener("input", () => { pause(); draw(Number(slider.value)); });
  play.addEventListener("click", () => (started ? pause() : run()));

  function open(episode, card) {
    const clips = document.getElementById("viewer-clips");
    clips.replaceChildren();
    const images = card.querySelectorAll(".film img");
    const draws = episode.clips.map((clip, index) => {
      const figure = document.createElement("figure");
      const canvas = document.createElement("canvas");
      const caption = document.createElement("figcaption");
      [canvas.width, canvas.height] = [clip.width, clip.height];
      caption.textContent = `${clip.title}: ${clip.outcome} after ${clip.length} steps`;
      figure.append(canvas, caption);
      if (index) clips.prepend(figure); // the policy before stands on the left
      else clips.append(figure);
      return (step) => {
        const frame = Math.min(Math.round((step / episode.hz) * clip.fps), clip.frames - 1);
        const [x, y] = [(frame % clip.columns) * clip.width, Math.floor(frame / clip.columns) * clip.height];
        canvas.getContext("2d").drawImage(
          images[index], x, y, clip.width, clip.height, 0, 0, clip.width, clip.height);
      };
    });
    document.getElementById("viewer-title").textContent =
      `seed ${episode.seed}: ${episode.outcome}, return ${episode.return}`;
    slider.max = Math.max(...[episode.length, ...episode.clips.map((clip) => clip.length)]);
    viewer.showModal();
    shown = { episode, draws, cursor: actions(episode) };
    draw(0);
    if (draws.length) run();
  }

  function draw(step) {
    slider.value = step;
    now.textContent = `${(step / shown.episode.hz).toFixed(2)} s`;
    for (const paint of shown.draws) paint(step);
    shown.cursor(step);
  }

  function run() {
    const first = Number(slider.value) >= Number(slider.max) ? 0 : Number(slider.value);
    started = { clock: performance.now(), first };
    play.textContent = "pause";
    requestAnimationFrame(advance);
  }

  function pause() {
    started = null;
    play.textContent = "play";
  }

  function advance(clock) {
    if (!started) return;
    const step = started.first + ((clock - started.clock) / 1000) * shown.episode.hz;
    draw(Math.min(Math.max(Math.floor(step), 0), Number(slider.max)));
    if (step >= Number(slider.max)) pause();
    else requestAnimationFrame(advance);
  }

  // actions over time; returns how to move the cursor to a step
  function actions(episode) {
    const place = document.getElementById("viewer-actions");
    place.replaceChildren();
    const rows = episode.actions;
    if (!rows.length) return () => {};
    const width = place.clientWidth; // so that text has its size on a phone, too
    const [left, right, top, bottom] = [46, width - 10, 10, 150];
    const svg = make("svg", { viewBox: `0 0 ${width} 190`, role: "img", "aria-label": "actions over time" }, place);
    const values = rows.flat();
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const y = (value) => bottom - ((bottom - top) * (value - low)) / (high - low || 1);
    const x = (step) => left + ((right - left) * step) / Number(slider.max);
    for (const value of [low, (low + high) / 2, high]) {
      make("line", { class: "rule", x1: left, x2: right, y1: y(value), y2: y(value) }, svg);
      make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, svg).textContent = value.toPrecision(2);
    }
    const legend = document.createElement("ul");
    legend.className = "legend";
    rows[0].forEach((_, index) => {
      const colour = `hsl(${(205 + (index * 360) / rows[0].length) % 360} 60% 52%)`;
      const points = rows.map((row, place) => `${x(place * episode.step).toFixed(1)},${y(row[index]).toFixed(1)}`);
      make("polyline", { class: "line", points: points.join(" "), stroke: colour }, svg);
      const item = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.style.background = colour;
      item.append(swatch, episode.names[index] ?? `action ${index}`);
      legend.append(item);
    });
    make("text", { x: (left + right) / 2, y: 180, "text-anchor": "middle" }, svg).textContent =
      "actions of the run's own policy over control steps";
    for (const step of [0, Number(slider.max)]) {
      make("text", { x: x(step), y: bottom + 16, "text-anchor": "middle" }, svg).textContent = step;
    }
    const cursor = make("line", { class: "cursor", y1: top, y2: bottom }, svg);
    place.append(legend);
    return (step) => { cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); };
  }

  for (const button of document.querySelectorAll("button.copy")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
      button.textContent = "copied";
    });
  }
})();
