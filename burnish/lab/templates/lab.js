"use strict";
(() => {
  const token = new URLSearchParams(location.search).get("token");
  const $ = (id) => document.getElementById(id);
  const canvas = $("scene");
  const pen = canvas.getContext("2d");
  const STROKE_PX = 3; // least distance of two points of a drawn line
  const OFF_PX = 1; // most distance of points that are left out from the line
  const MOST_POINTS = 256;
  const CHART_PX = 64; // height of the chart of one entry of an action

  // what is known: facts of the policy, the scene, the episode, what was computed for it
  let facts = null, scene = null, episode = null, plans = [], film = [], executed = 0, compared = {};
  let sketch = [], drawing = false, dragging = false, sliding = null, playing = false, rolling = null;

  // -- messages: one of a kind is on its way at a time, and the newest follows it ------------------------

  // the page of docs/draw brings a session of its own
  const address = `ws://${location.host}/live?token=${encodeURIComponent(token)}`;
  const socket = globalThis.ownSocket?.() ?? new WebSocket(address);
  const asked = new Map(); // number of a message -> the time of the event behind it [ms]
  let number = 0, waiting = null, next = null;

  function send(message, since) {
    if (since !== undefined && waiting !== null) {
      next = { message: { ...next?.message, ...message }, since };
      return;
    }
    number += 1;
    if (since !== undefined) {
      waiting = number;
      asked.set(number, since);
      message.id = number;
    }
    socket.send(JSON.stringify(message));
  }

  socket.addEventListener("close", () => {
    for (const id of ["play", "step", "restart", "compare"]) $(id).disabled = true;
    const saidWhy = !facts && !$("problem").hidden;
    if (!saidWhy) problem("The laboratory has ended. Start burnish lab again.");
  });
  socket.addEventListener("message", (event) => {
    const message = JSON.parse(event.data);
    if (message.scene) scene = message.scene;
    if (message.facts) begin(message.facts);
    if (message.scene) {
      if (message.seed !== undefined) {
        episode = { trail: [], seed: message.seed };
        arrivals.length = 0;
        if (document.activeElement !== $("seed")) $("seed").value = message.seed;
        show();
      }
      resize();
    }
    if (message.error) problem(message.error);
    if (message.step !== undefined) take(message);
    if (message.compared) {
      compares(false);
      if (message.round === round) showCompared(message.compared);
    }
    if (message.id !== undefined) answered(message);
    redraw();
  });

  function take(message) {
    const isNew = episode.step !== message.step;
    if (isNew) arrivals.push(performance.now());
    if (message.at) {
      if (isNew || apart(episode.trail.at(-1), message.at) > 0) episode.trail.push(message.at);
      episode.at = message.at;
    } else {
      $("picture").src = message.picture;
    }
    episode.step = message.step;
    episode.end = message.end;
    if (message.plans) {
      ({ plans, film, executed } = message);
      $("command").textContent = message.command;
      $("python").textContent = message.python;
      $("python-box").hidden = !message.python;
      if (film.length) {
        const last = Number($("frame").value) >= Number($("frame").max);
        $("frame").max = film.length - 1;
        if (last) $("frame").value = film.length - 1;
        showValues();
      }
    }
  }

  function answered(message) {
    const since = asked.get(message.id);
    asked.delete(message.id);
    waiting = null;
    if (!message.error) $("problem").hidden = true; // it stays until something else is asked
    if (message.plans && since !== undefined) delays.push(since);
    if (next) {
      const { message: newest, since: then } = next;
      next = null;
      send(newest, then);
    }
  }

  function problem(text) {
    $("problem").textContent = text;
    $("problem").hidden = false;
  }

  // -- controls ------------------------------------------------------------------------------------------

  const NAMES = {
    off: "off", random: "random: the policy alone", output_perturbation: "output perturbation",
    post_hoc_ranking: "post-hoc ranking", biased_initialization: "biased initialization",
    guided_diffusion: "guided diffusion", stochastic_sampling: "stochastic sampling",
  };

  function begin(found) {
    facts = found;
    const rule = facts.rule ? ` Success: ${facts.rule}.` : "";
    $("subject").textContent = `${facts.policies.join(" + ")} on ${facts.task}.${rule}`;
    for (const name of Object.keys(NAMES)) $("strategy").add(new Option(NAMES[name], name));
    const denoises = facts.sampler !== null;
    $("strategy").value = denoises ? "guided_diffusion" : "off";
    $("strategy").disabled = !denoises;
    $("denoising").disabled = !denoises;
    for (const name of Object.keys(facts.samplers)) $("sampler").add(new Option(name, name));
    if (denoises) $("sampler").value = facts.sampler;
    $("plans").max = facts.most_plans;
    $("plans").value = 16;
    $("noise").value = 1;
    $("weight").value = 0.5;
    $("weight-row").hidden = facts.policies.length < 2;
    $("compare-title").textContent = `${facts.starts} starts`;
    compares(false);
    showCompared({});
    ownSteps();
    strength();
    showValues();
    $("bench").hidden = false;
  }

  // the stage of a task: a drawing from above, or a picture over charts of actions
  function show() {
    const isPicture = scene.picture !== undefined;
    $("picture").hidden = !isPicture;
    $("sketching").hidden = isPicture;
    canvas.classList.toggle("charts", isPicture);
    if (isPicture) $("strategy").value = "off";
    $("hint").textContent = isPicture ? "Planned actions over time; the shaded ones are executed."
      : (facts.sampler ? "Draw a line and the policy follows it. " : "")
        + "Drag the disc and it goes on from there."
        + (scene.slides ? " Drag a pillar and its row moves sideways." : "");
  }

  // the steps of the chosen sampler as it is, until the slider is moved
  let steps = null;
  function ownSteps() {
    steps = null;
    const own = facts.samplers[$("sampler").value] ?? { steps: 1, is_free: false };
    $("steps").disabled = !own.is_free;
    $("steps").max = Math.max(50, own.steps);
    $("steps").value = own.steps;
  }

  function strength() {
    const slider = facts.strengths[$("strategy").value];
    $("strength-row").hidden = !slider;
    if (!slider) return;
    $("strength-key").textContent = slider.key;
    Object.assign($("strength"), { min: slider.low, max: slider.high, step: slider.step });
    $("strength").value = slider.default;
  }

  function controls() {
    const slider = facts.strengths[$("strategy").value];
    return {
      strategy: $("strategy").value,
      strength: slider ? Number($("strength").value) : null,
      sketch: scene.picture ? [] : simplified(sketch, OFF_PX * metresPerPixel()),
      sampler: facts.sampler === null || $("sampler").value === facts.sampler ? null : $("sampler").value,
      steps,
      noise: Number($("noise").value),
      plans: Number($("plans").value),
      weight: Number($("weight").value),
      film: $("film").checked,
    };
  }

  function showValues() {
    for (const id of ["strength", "plans", "noise", "weight", "steps", "frame"]) {
      $(`${id}-value`).textContent = id === "noise" ? `× ${$(id).value}` : $(id).value;
    }
    $("frame-value").textContent = `${$("frame").value} / ${$("frame").max}`;
    $("play").textContent = playing ? "pause" : "play";
    $("roll").textContent = rolling ? "stop" : "film";
  }

  function changed(event) {
    showValues();
    send({ controls: controls() }, event?.timeStamp ?? performance.now());
  }

  function play(on) {
    playing = on;
    arrivals.length = 0;
    send({ play: on }, performance.now());
    showValues();
  }

  for (const id of ["strength", "plans", "noise", "weight"]) $(id).addEventListener("input", changed);
  $("steps").addEventListener("input", (event) => { steps = Number($("steps").value); changed(event); });
  $("sampler").addEventListener("change", (event) => { ownSteps(); changed(event); });
  $("strategy").addEventListener("change", (event) => { strength(); changed(event); });
  for (const id of ["strength", "noise", "weight", "steps", "sampler", "strategy"]) $(id).addEventListener("input", forget);
  $("clear").addEventListener("click", (event) => { sketch = []; forget(); changed(event); });
  $("play").addEventListener("click", () => play(!playing));
  $("step").addEventListener("click", () => { if (playing) play(false); send({ step: true }, performance.now()); });
  $("restart").addEventListener("click", () => send({ seed: Number($("seed").value) }, performance.now()));
  $("compare").addEventListener("click", () => {
    compares(true);
    round += 1;
    send({ controls: controls(), compare: round }, performance.now());
  });
  $("film").addEventListener("change", (event) => {
    const on = $("film").checked;
    if (on && playing) play(false);
    if (on && episode.end) send({ seed: episode.seed });
    if (!on) roll(false);
    $("roll").disabled = !on;
    $("frame-row").hidden = !on;
    changed(event);
  });
  $("frame").addEventListener("input", () => { roll(false); showValues(); redraw(); });
  $("roll").addEventListener("click", () => roll(!rolling));
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText($(button.dataset.of).textContent);
      button.textContent = "copied";
    });
  }

  function roll(on) {
    clearInterval(rolling);
    rolling = on ? setInterval(() => {
      $("frame").value = (Number($("frame").value) + 1) % (Number($("frame").max) + 1);
      showValues();
      redraw();
    }, Math.max(2000 / Math.max(film.length, 1), 50)) : null;
    showValues();
  }

  let round = 0; // of the comparison that is shown, or will be; a change makes answers of earlier ones void
  function forget() {
    round += 1;
    showCompared({});
  }

  function compares(on) {
    $("compare").disabled = on;
    const what = scene.picture === undefined && facts.sampler ? "play them, steered and not" : "play them";
    $("compare").textContent = on ? "playing …" : what;
  }

  function showCompared(found) {
    compared = found;
    const table = $("compared");
    table.replaceChildren();
    table.hidden = !Object.keys(found).length;
    if (table.hidden) return;
    const row = (cells, name) => {
      const line = table.insertRow();
      cells.forEach((text) => { line.insertCell().textContent = text; });
      if (name) {
        const swatch = document.createElement("i");
        swatch.className = `swatch ${name}`;
        line.cells[0].prepend(swatch);
      }
    };
    const isShare = facts.quantity === "success", isPicture = scene.picture !== undefined;
    row(["", facts.quantity, ...(isPicture ? [] : ["off the line"])]);
    for (const [name, one] of Object.entries(found)) {
      const off = one.off_m === null ? "–" : `${(1000 * one.off_m).toFixed(1)} mm`;
      const value = isShare ? `${Math.round(100 * one.value)} %` : one.value.toFixed(1);
      row([name === "plain" ? "the policy alone" : "steered", value, ...(isPicture ? [] : [off])], name);
    }
  }

  // -- the mouse -----------------------------------------------------------------------------------------

  function place(event) {
    const box = canvas.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * (scene.high[0] - scene.low[0]) + scene.low[0];
    const y = scene.high[1] - ((event.clientY - box.top) / box.height) * (scene.high[1] - scene.low[1]);
    return [Number(x.toFixed(4)), Number(y.toFixed(4))];
  }

  const metresPerPixel = () => (scene.high[0] - scene.low[0]) / canvas.getBoundingClientRect().width;

  // a line without the points that lie on it (Douglas-Peucker)
  function simplified(points, tolerance) {
    if (points.length < 3) return points;
    const [a, b] = [points[0], points.at(-1)];
    const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
    const length = Math.hypot(dx, dy);
    let farthest = 0, at = 0;
    for (let i = 1; i < points.length - 1; i++) {
      const [x, y] = [points[i][0] - a[0], points[i][1] - a[1]];
      const off = length ? Math.abs(x * dy - y * dx) / length : Math.hypot(x, y);
      if (off > farthest) [farthest, at] = [off, i];
    }
    if (farthest <= tolerance) return [a, b];
    return [...simplified(points.slice(0, at + 1), tolerance), ...simplified(points.slice(at), tolerance).slice(1)];
  }

  const apart = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]);
  const isOver = (at) => !episode.end && apart(at, episode.at) < 1.5 * scene.radius;
  const pillarAt = (at) => (scene.slides && !episode.end ? scene.pillars.findIndex((one) => apart(at, one) < one[2]) : -1);

  canvas.addEventListener("pointerdown", (event) => {
    if (!scene || scene.picture || event.button) return; // other buttons than the first one draw nothing
    canvas.setPointerCapture(event.pointerId);
    const at = place(event);
    if (isOver(at)) {
      dragging = true;
    } else if (pillarAt(at) >= 0) {
      sliding = { pillar: pillarAt(at), off: at[0] - scene.pillars[pillarAt(at)][0] };
    } else {
      drawing = true;
      sketch = [at];
      if (episode.end) send({ seed: episode.seed });
      round += 1;
      if (compared.steered) showCompared({});
    }
    redraw();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!scene || scene.picture) return;
    const at = place(event);
    if (dragging) {
      send({ move: at }, event.timeStamp);
    } else if (sliding) {
      send({ slide: [sliding.pillar, at[0] - sliding.off] }, event.timeStamp);
    } else if (drawing) {
      if (apart(at, sketch.at(-1)) < STROKE_PX * metresPerPixel() || sketch.length >= MOST_POINTS) return;
      sketch.push(at);
      changed(event);
      redraw();
    } else {
      canvas.classList.toggle("over", isOver(at) || pillarAt(at) >= 0);
    }
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, (event) => {
      if (drawing && sketch.length < 2) { sketch = []; changed(event); }
      drawing = dragging = false;
      sliding = null;
      redraw();
    });
  }

  // -- the drawing ---------------------------------------------------------------------------------------

  const arrivals = [], delays = []; // of frames; of events whose plans are not drawn yet [ms]
  let isDue = false;

  function redraw() {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      if (!scene) return;
      (scene.picture ? charts : draw)();
      measure();
    });
  }

  function measure() {
    const now = performance.now();
    if (delays.length) {
      const worst = now - Math.min(...delays.splice(0));
      $("delay").textContent = `mouse to plan: ${worst.toFixed(0)} ms`;
      canvas.dataset.delays = `${canvas.dataset.delays ?? ""} ${worst.toFixed(1)}`.split(" ").slice(-100).join(" ");
    }
    while (arrivals.length && now - arrivals[0] > 2000) arrivals.shift();
    const span = now - arrivals[0];
    const rate = playing && arrivals.length > 5 ? ((arrivals.length - 1) * 1000) / (arrivals.at(-1) - arrivals[0]) : 0;
    $("rate").textContent = rate && span > 500 ? `${rate.toFixed(1)} frames/s` : "";
    $("where").textContent = `seed ${episode.seed}, step ${episode.step}${episode.end ? `: ${episode.end}` : ""}`;
  }

  function resize() {
    if (scene.picture) {
      size(canvas.parentElement.clientWidth || 380, CHART_PX * scene.actions.length);
      return;
    }
    const [wide, high] = [scene.high[0] - scene.low[0], scene.high[1] - scene.low[1]];
    const room = canvas.parentElement.clientWidth || 380;
    const height = Math.min((room * high) / wide, Math.max(innerHeight * 0.7, 320));
    size((height * wide) / high, height);
  }

  function size(width, height) {
    const ratio = devicePixelRatio || 1;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    redraw();
  }
  addEventListener("resize", () => scene && resize());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  function draw() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const scale = canvas.width / (scene.high[0] - scene.low[0]); // pixels per metre
    const X = (x) => (x - scene.low[0]) * scale;
    const Y = (y) => (scene.high[1] - y) * scale;
    const disc = (x, y, r, fill, alpha = 1) => {
      pen.globalAlpha = alpha;
      pen.fillStyle = fill;
      pen.beginPath();
      pen.arc(X(x), Y(y), r * scale, 0, 2 * Math.PI);
      pen.fill();
      pen.globalAlpha = 1;
    };
    const box = ([x, y, a, b], fill) => {
      pen.fillStyle = fill;
      pen.fillRect(X(x - a), Y(y + b), 2 * a * scale, 2 * b * scale);
    };
    const line = (points, stroke, width, alpha = 1, dash = []) => {
      if (points.length < 2) return;
      pen.globalAlpha = alpha;
      pen.strokeStyle = stroke;
      pen.lineWidth = width * (devicePixelRatio || 1);
      pen.setLineDash(dash.map((part) => part * (devicePixelRatio || 1)));
      pen.beginPath();
      points.forEach(([x, y], i) => (i ? pen.lineTo(X(x), Y(y)) : pen.moveTo(X(x), Y(y))));
      pen.stroke();
      pen.setLineDash([]);
      pen.globalAlpha = 1;
    };
    pen.lineJoin = pen.lineCap = "round";
    pen.clearRect(0, 0, canvas.width, canvas.height);
    if (scene.finish) finish(scene.finish, colour, box);
    if (scene.goal) disc(...scene.goal, colour("won"), 0.35);
    for (const [x, y, r] of scene.pillars) disc(x, y, r, colour("pillar"));
    for (const one of scene.walls) box(one, colour("pillar"));
    for (const [name, one] of Object.entries(compared)) {
      for (const path of one.paths) line(path, colour(name === "plain" ? "quiet" : "accent"), 1.2, 0.5);
    }
    line(sketch, colour("sketch"), 3, 0.9, [7, 6]);
    line(episode.trail, colour("ink"), 2, 0.8);
    if ($("film").checked && film.length) {
      const frame = film[Math.min(Number($("frame").value), film.length - 1)];
      for (const path of frame) line(path, colour("accent"), 1.6, Math.max(0.25, 4 / frame.length));
    } else if (!episode.end) {
      for (const path of plans.slice(1)) line(path, colour("accent"), 1.4, Math.max(0.2, 4 / plans.length));
      if (plans.length) line(plans[0], colour("accent"), 3.2);
    }
    const end = { success: colour("won"), failure: colour("lost"), "time limit": colour("lost") }[episode.end];
    disc(...episode.at, scene.radius, end ?? colour("body"));
  }

  // the plans, or a frame of the film, as one chart per entry of the action
  function charts() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const ratio = devicePixelRatio || 1, high = CHART_PX * ratio, edge = 4 * ratio, head = 16 * ratio;
    const filmed = $("film").checked && film.length;
    const shown = filmed ? film[Math.min(Number($("frame").value), film.length - 1)] : plans;
    if (!shown.length) return;
    const rows = shown[0].length, X = (i) => ((i + 0.5) / rows) * canvas.width;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.font = `${12 * ratio}px system-ui, sans-serif`;
    pen.textBaseline = "top";
    scene.actions.forEach((name, entry) => {
      const top = entry * high, values = shown.flatMap((plan) => plan.map((row) => row[entry]));
      const [low, up] = [scene.lows[entry] ?? Math.min(...values), scene.highs[entry] ?? Math.max(...values)];
      const Y = (value) => top + high - edge - ((value - low) / (up - low || 1)) * (high - head - 2 * edge);
      if (!filmed) {
        pen.fillStyle = colour("rule");
        pen.fillRect(0, top + head, (executed / rows) * canvas.width, high - head - edge);
      }
      pen.fillStyle = colour("quiet");
      pen.fillText(name, edge, top + 1);
      pen.save(); // states of the denoising loop leave the limits of actions
      pen.beginPath();
      pen.rect(0, top + head, canvas.width, high - head);
      pen.clip();
      pen.strokeStyle = colour("accent");
      [...shown].reverse().forEach((plan, i) => {
        const isFirst = !filmed && i === shown.length - 1;
        pen.globalAlpha = isFirst ? 1 : Math.max(0.2, 4 / shown.length);
        pen.lineWidth = (isFirst ? 2.6 : 1.3) * ratio;
        pen.beginPath();
        plan.forEach((row, j) => pen[j ? "lineTo" : "moveTo"](X(j), Y(row[entry])));
        pen.stroke();
      });
      pen.restore();
    });
  }

  function finish([x, y, a, b], colour, box) {
    const size = b, columns = Math.round((2 * a) / size);
    for (let i = 0; i < columns; i++) {
      for (let j = 0; j < 2; j++) {
        if ((i + j) % 2) box([x - a + (i + 0.5) * size, y - b + (j + 0.5) * size, size / 2, size / 2], colour("quiet"));
      }
    }
  }
})();
