"use strict";
// A session of the laboratory that runs in the page: the exported graphs of a policy for `avoid` by onnxruntime-web,
// the task by MuJoCo's own WebAssembly build. It answers the messages of burnish/lab/server.py.
//
// Legend: B observations, N plans, K denoising steps, Th rows of a plan, Da action width; plans are flat, row by row,
// and normalised unless they are said to be physical. What is computed is that of policies/samplers/step_table.py,
// policies/wrappers/sketch_guidance.py and sketches.py; the numbers come from `python -m benchmarks.draw`.
globalThis.draw = (() => {
  const FILM_PLANS = 64; // in a film, at most
  const PATH_POINTS = 120; // of an episode that is shown, at most
  const PAUSE_MS = 1000; // between the end of an episode and the next one
  const BUSY_MS = 40; // of computing before the page may draw and listen

  const clip = (x, limit) => (limit === null ? x : Math.min(Math.max(x, -limit), limit));
  const rounded = (value) => (Array.isArray(value) ? value.map(rounded) : Math.round(value * 1e4) / 1e4);
  const apart = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]);
  const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });

  // -- random numbers ------------------------------------------------------------------------------------

  // The state words (8 of 32 bits) that numpy.random.SeedSequence makes of a seed below 2^32.
  function seedWords(seed) {
    const mixing = (first, factor) => {
      let held = first;
      return (value) => {
        let mixed = (value ^ held) >>> 0;
        held = Math.imul(held, factor) >>> 0;
        mixed = Math.imul(mixed, held) >>> 0;
        return (mixed ^ (mixed >>> 16)) >>> 0;
      };
    };
    const into = mixing(0x43b0d7e5, 0x931e8875), out = mixing(0x8b51f9dd, 0x58f38ded);
    const pool = [seed, 0, 0, 0].map(into);
    for (let from = 0; from < 4; from++) {
      for (let to = 0; to < 4; to++) {
        if (from === to) continue;
        const mixed = Math.imul(0xca01f9dd, pool[to]) - Math.imul(0x4973f715, into(pool[from]));
        pool[to] = (mixed ^ (mixed >>> 16)) >>> 0;
      }
    }
    return Array.from({ length: 8 }, (_, i) => out(pool[i % 4]));
  }

  // The first numbers of numpy.random.default_rng(seed).uniform(-1, 1): PCG64 (XSL-RR).
  function uniforms(seed, count) {
    const words = seedWords(seed).map(BigInt);
    const long = (i) => (words[i + 1] << 96n) | (words[i] << 64n) | (words[i + 3] << 32n) | words[i + 2];
    const increment = BigInt.asUintN(128, (long(4) << 1n) | 1n);
    const next = (state) => BigInt.asUintN(128, state * 0x2360ed051fc65da44385df649fccf645n + increment);
    let state = next(BigInt.asUintN(128, increment + long(0)));
    return Array.from({ length: count }, () => {
      state = next(state);
      const turn = state >> 122n, folded = BigInt.asUintN(64, (state >> 64n) ^ state);
      const turned = BigInt.asUintN(64, (folded >> turn) | (folded << (64n - turn)));
      return 2 * (Number(turned >> 11n) / 2 ** 53) - 1;
    });
  }

  // Standard normals (Box-Muller) of a 32-bit generator (sfc32) that depend on the seeds alone, times a factor.
  function normals(seeds, count, factor) {
    let [a, b, c] = [...seeds, 0, 0, 0];
    let counter = 1;
    const bits = () => {
      const sum = (a + b + counter) | 0;
      counter = (counter + 1) | 0;
      a = b ^ (b >>> 9);
      b = (c + (c << 3)) | 0;
      c = (((c << 21) | (c >>> 11)) + sum) | 0;
      return sum >>> 0;
    };
    for (let i = 0; i < 15; i++) bits();
    const drawn = new Float32Array(count);
    for (let i = 0; i < count; i += 2) {
      const length = factor * Math.sqrt(-2 * Math.log((bits() + 1) / 2 ** 32));
      const angle = (2 * Math.PI * bits()) / 2 ** 32;
      drawn[i] = length * Math.cos(angle);
      if (i + 1 < count) drawn[i + 1] = length * Math.sin(angle);
    }
    return drawn;
  }

  // -- the sketch ----------------------------------------------------------------------------------------

  // A drawn line that is followed from the observed position; actions are displacements (PositionSketch).
  class Sketch {
    constructor(points, plane) {
      this.plane = plane;
      const corners = points.filter((point, i) => !i || apart(point, points[i - 1]) > 0);
      let before = 0;
      this.segments = corners.slice(1).map((end, i) => {
        const start = corners[i], length = apart(start, end);
        before += length;
        return { start, side: [end[0] - start[0], end[1] - start[1]], length, before: before - length };
      });
    }

    // The length along the line of its point that is nearest to a position.
    nearest([x, y]) {
      let least = Infinity, along = 0;
      for (const { start, side, length, before } of this.segments) {
        const [dx, dy] = [x - start[0], y - start[1]];
        const share = Math.min(Math.max((dx * side[0] + dy * side[1]) / length ** 2, 0), 1);
        const distance = Math.hypot(dx - share * side[0], dy - share * side[1]);
        if (distance < least) [least, along] = [distance, before + share * length];
      }
      return along;
    }

    // The point at a length along the line, which ends where it ends.
    place(along) {
      const { start, side, length, before } = this.segments.findLast((one) => one.before <= along) ?? this.segments[0];
      const share = Math.min(Math.max((along - before) / length, 0), 1);
      return [start[0] + share * side[0], start[1] + share * side[1]];
    }

    distance(position) {
      return apart(position, this.place(this.nearest(position)));
    }

    // The guide of a plan (Th x 2), physical.
    guide(here, { horizon, actionStart }) {
      const nearest = this.nearest(here), foot = this.place(nearest);
      const targets = Array.from({ length: horizon + 1 }, (_, i) => {
        const step = i - actionStart, fade = 1 - Math.max(step, 0) / horizon;
        const [x, y] = this.place(nearest + this.plane.pace * step);
        return [x + fade * (here[0] - foot[0]), y + fade * (here[1] - foot[1])];
      });
      return targets.slice(1).flatMap((to, i) => to.map((one, axis) => (one - targets[i][axis]) / this.plane.reach));
    }
  }

  // -- the policy ----------------------------------------------------------------------------------------

  class Policy {
    static async open(ort, { encoder, step, loop, levels }) {
      const open = (graph) => ort.InferenceSession.create(new Uint8Array(graph));
      const rows = loop.rows.map((row, k) => ({
        limit: row.limit[0], ratio: row.ratio[0], fromY: row.mean_y[0], fromX: row.mean_x[0], std: row.std[0],
        time: row.time[0], t: levels.t[k], alpha: levels.alpha[k], sigma: levels.sigma[k],
      }));
      return Object.assign(new Policy(), {
        ort, encoder: await open(encoder), network: await open(step), loop, rows,
        horizon: levels.horizon, width: loop.action_scale.length, actionStart: loop.action_start,
      });
    }

    get size() { return this.horizon * this.width; } // of a plan

    // Rows with several evaluations of a level: all but the last redraw its noise around the clean plan.
    table(evaluations) {
      return this.rows.flatMap((row) => {
        const staying = { ...row, fromY: (row.alpha * this.loop.clip_x0) / row.limit, fromX: 0, std: row.sigma };
        return [...Array(evaluations - 1).fill(staying), row];
      });
    }

    // The table of a strategy's settings, and where it is entered.
    recipe(settings) {
      const recipe = { guide_rows: Math.floor((this.loop.act_steps + 1) / 2), ...settings };
      const rows = this.table(recipe.resample_steps);
      const first = recipe.starts_at_guide ? rows.findIndex((row) => row.t >= recipe.start - 1e-6) : 0;
      if (first < 0) throw new Error(`start must be at most ${rows.at(-1).t}; got ${recipe.start}.`);
      return { ...recipe, rows, first, calls: rows.length - first };
    }

    // Numbers in the noise of B decisions: B x candidates x (K + 1) x Th x Da, the start first.
    noiseSize(recipe, count) {
      return count * recipe.candidates * (recipe.rows.length + 1) * this.size;
    }

    normalized(physical) {
      return physical.map((one, i) => one * this.scale(i) + this.loop.action_offset[i % this.width]);
    }

    scale(i) { return this.loop.action_scale[i % this.width]; }

    // A plan as physical actions, row by row.
    physical(plan) {
      const action = (row, d) => (plan[row * this.width + d] - this.loop.action_offset[d]) / this.scale(d);
      return Array.from({ length: plan.length / this.width }, (_, row) => (
        Array.from({ length: this.width }, (_one, d) => action(row, d))
      ));
    }

    // Plans for B observations, and the states of their denoising if they are wanted.
    //   observations: Float32Array (B x Do); guides: B physical guides, or null; noise: see noiseSize.
    async plan({ observations, count, guides, recipe, noise, film = false }) {
      const { size, ort } = this, { rows, first, candidates } = recipe;
      const total = count * candidates, length = total * size, stride = (rows.length + 1) * size;
      const shape = [total, this.horizon, this.width];
      const guide = guides && guides.map((one) => this.normalized(one));
      const beside = guide && new Float64Array(length);
      for (let i = 0; beside && i < total; i++) beside.set(guide[Math.floor(i / candidates)], i * size);
      const draw = (k, i) => noise[Math.floor(i / size) * stride + k * size + (i % size)];

      let x = new Float64Array(length);
      for (let i = 0; i < length; i++) {
        x[i] = recipe.starts_at_guide ? beside[i] + recipe.noise_share * draw(0, i) : this.loop.start_std * draw(0, i);
      }
      const cond = await this.encoded(observations, count, candidates), states = [];
      let began = performance.now();
      for (let k = first; k < rows.length; k++) {
        if (performance.now() - began > BUSY_MS) {
          await pause(0);
          began = performance.now();
        }
        if (film) states.push(x.slice(0, FILM_PLANS * size));
        const row = rows[k], feeds = { ...cond, x: new ort.Tensor("float32", Float32Array.from(x), shape) };
        feeds.time = new ort.Tensor("float32", [row.time], [1]);
        const prediction = (await this.network.run(feeds)).prediction.data;
        const isGuided = beside && recipe.scale && rows.length - k > recipe.resample_steps;
        x = this.step(row, x, prediction, isGuided ? { guide: beside, recipe } : null);
        for (let i = 0; i < length; i++) {
          x[i] = clip(x[i] + row.std * clip(draw(k + 1, i), this.loop.noise_clip), this.loop.clip_state);
        }
      }
      for (let i = 0; i < length; i++) x[i] = clip(x[i], this.loop.clip_action);
      if (film) states.push(x.slice(0, FILM_PLANS * size));
      const plans = Array.from({ length: count }, (_, i) => this.chosen(x, i, guide?.[i], recipe));
      return { plans, states, calls: recipe.calls };
    }

    async encoded(observations, count, candidates) {
      const shape = [count, 1, observations.length / count];
      const cond = await this.encoder.run({ observation: new this.ort.Tensor("float32", observations, shape) });
      return Object.fromEntries(Object.entries(cond).map(([name, { data, dims }]) => {
        const width = data.length / count, repeated = new Float32Array(count * candidates * width);
        for (let i = 0; i < count * candidates; i++) {
          const from = Math.floor(i / candidates) * width;
          repeated.set(data.subarray(from, from + width), i * width);
        }
        return [name, new this.ort.Tensor("float32", repeated, [count * candidates, ...dims.slice(1)])];
      }));
    }

    // The mean of the next state; y is proportional to the clean plan, which guidance moves.
    step(row, x, prediction, guided) {
      const found = new Float64Array(x.length), unit = this.loop.clip_x0 / row.limit;
      for (let i = 0; i < x.length; i++) {
        found[i] = this.loop.predicts_x0 ? prediction[i] : x[i] + row.ratio * prediction[i];
      }
      if (guided) this.pull(found, unit, row, guided);
      for (let i = 0; i < x.length; i++) found[i] = row.fromY * clip(found[i], row.limit) + row.fromX * x[i];
      return found;
    }

    // Move rows of clean plans (unit * y) towards the guide, at most onto it (GuideHook, gradient at x0).
    pull(y, unit, row, { guide, recipe }) {
      const length = (recipe.scale * row.sigma) / Math.max(row.alpha, 1e-9) / this.horizon, { width } = this;
      for (let i = 0; i < y.length; i += width) {
        let off = 0;
        for (let d = i; d < i + width; d++) {
          y[d] = clip(unit * y[d], recipe.limit);
          off += (y[d] - guide[d]) ** 2;
        }
        const share = Math.min(length / Math.max(Math.sqrt(off), 1e-12), 1);
        for (let d = i; d < i + width; d++) y[d] = (y[d] - share * (y[d] - guide[d])) / unit;
      }
    }

    // The candidate of an observation that is nearest to the guide; the first one where there is none.
    chosen(x, index, guide, { candidates, begins_with_guide: begins, guide_rows: rows }) {
      const { size, width } = this;
      let best = null, least = Infinity;
      for (let c = 0; c < candidates; c++) {
        const from = (index * candidates + c) * size, plan = x.slice(from, from + size);
        let distance = 0;
        for (let i = 0; guide && i < size; i += width) {
          let off = 0;
          for (let d = i; d < i + width; d++) off += (plan[d] - guide[d]) ** 2;
          distance += Math.sqrt(off);
        }
        if (best === null || distance < least) [best, least] = [plan, distance];
      }
      const first = this.actionStart * width;
      if (guide && begins) best.set(guide.slice(first, first + rows * width), first);
      return best;
    }
  }

  // -- the task ------------------------------------------------------------------------------------------

  // Discs of `avoid`, each in its own simulator state of one model (AvoidStepper).
  class Avoid {
    constructor(mujoco, xml, task, count) {
      this.mujoco = mujoco;
      this.task = task;
      this.model = mujoco.MjModel.from_xml_string(xml);
      this.discs = Array.from({ length: count }, () => new mujoco.MjData(this.model));
    }

    reset(i, seed) {
      const start = uniforms(seed, 2).map((one, axis) => one * this.task.start_spread[axis]);
      this.mujoco.mj_resetData(this.model, this.discs[i]);
      return this.put(i, start);
    }

    put(i, position) {
      const { half_width: wide, back_y: low, finish_y: high, radius: room } = this.task;
      const x = Math.min(Math.max(position[0], room - wide), wide - room);
      this.discs[i].qpos.set([x, Math.min(Math.max(position[1], low + room), high)]);
      this.mujoco.mj_forward(this.model, this.discs[i]);
      return this.observed(i);
    }

    observed(i) { return [...this.discs[i].qpos, ...this.discs[i].qvel]; }

    // Advance for one control step, or until a contact; returns the observation and how the episode ended, if so.
    step(i, action) {
      const { mujoco, model, task } = this, disc = this.discs[i];
      disc.ctrl.set(action.map((one) => task.max_speed * one));
      let hit = false;
      for (let k = 0; k < task.substeps && !hit; k++) {
        mujoco.mj_step(model, disc);
        hit = disc.ncon > 0;
      }
      const observation = this.observed(i);
      const end = hit ? "failure" : observation[1] >= task.finish_y ? "success" : "";
      return { observation, end };
    }

    close() {
      for (const disc of this.discs) disc.delete();
      this.model.delete();
    }
  }

  // -- a visitor -----------------------------------------------------------------------------------------

  // An episode under changing controls (burnish/lab/session.py).
  class Session {
    static async open({ ort, mujoco, files }) {
      const [encoder, step, loop, known, xml] = await Promise.all(
        ["encoder.onnx", "step.onnx", "loop.json", "facts.json", "avoid.xml"].map(files),
      );
      const text = (bytes) => new TextDecoder().decode(bytes), made = JSON.parse(text(known));
      const graphs = { encoder, step, loop: JSON.parse(text(loop)), levels: made.levels };
      const policy = await Policy.open(ort, graphs);
      return new Session(policy, made, (count) => new Avoid(mujoco, text(xml), made.task, count));
    }

    constructor(policy, made, tasks) {
      Object.assign(this, { policy, made, tasks, task: tasks(1), queue: [], seed: 0 });
      this.controls = { strategy: "off", strength: null, sketch: [], noise: 1, plans: 16, film: false };
    }

    get isSteered() {
      const { strategy, sketch } = this.controls;
      return strategy !== "off" && sketch.some((point) => apart(point, sketch[0]) > 0);
    }

    begin(seed) {
      const isOne = Number.isInteger(seed) && seed >= 0 && seed < 2 ** 32;
      if (!isOne) throw new Error("seed must be a whole number below 2^32.");
      Object.assign(this, { seed, decisions: 0, steps: 0, end: "" });
      this.observation = this.task.reset(0, seed);
      return { scene: this.made.scene, seed };
    }

    async reset(seed) {
      return { ...this.begin(seed), ...(await this.plan()) };
    }

    async control(values) {
      const before = this.controls;
      this.controls = { ...before, ...values };
      try {
        return await this.plan();
      } catch (error) {
        this.controls = before;
        throw error;
      }
    }

    async move(place) {
      if (this.end) return this.frame();
      this.observation = this.task.put(0, place);
      return this.plan();
    }

    async step() {
      if (this.end) return this.reset((this.seed + 1) % 2 ** 32);
      let planned = {};
      if (!this.queue.length) {
        this.decisions += 1;
        planned = await this.plan();
      }
      const { observation, end } = this.task.step(0, this.queue.shift());
      this.observation = observation;
      this.steps += 1;
      this.end = end || (this.steps >= this.made.task.max_episode_steps ? "time limit" : "");
      return { ...planned, ...this.frame() };
    }

    frame() {
      return { at: rounded(this.observation.slice(0, 2)), step: this.steps, end: this.end };
    }

    // Plans for B observations under the controls; without a line they are those of the policy alone.
    planned(controls, sketch, observations, seeds, film = false) {
      const { policy } = this, count = observations.length, recipe = policy.recipe(this.settings(controls, sketch));
      const noise = normals(seeds, policy.noiseSize(recipe, count), controls.noise);
      const guides = sketch && observations.map((one) => sketch.guide(one, policy));
      const seen = Float32Array.from(observations.flat());
      return policy.plan({ observations: seen, count, guides, recipe, noise, film });
    }

    // What the strategy has, its slider's value replacing one of it.
    settings({ strategy, strength }, sketch) {
      const { strategies, steering, facts } = this.made, slider = facts.strengths[strategy];
      if (!sketch) return { ...steering, ...strategies.random };
      const chosen = slider && strength !== null ? { [slider.key]: strength } : {};
      return { ...steering, ...strategies[strategy], ...chosen };
    }

    async plan() {
      const started = performance.now(), { controls, policy } = this;
      const { act_steps: held, action_start: ahead } = policy.loop;
      const sketch = this.isSteered ? new Sketch(controls.sketch, this.made.plane) : null;
      const seen = Array(controls.plans).fill(this.observation), seeds = [this.seed, this.decisions];
      const { plans, states, calls } = await this.planned(controls, sketch, seen, seeds, controls.film);
      const actions = plans.map((plan) => policy.physical(plan));
      this.queue = actions[0].slice(ahead, ahead + held);
      const path = (plan) => this.path(plan.slice(ahead));
      const film = states.map((state) => (
        Array.from({ length: state.length / policy.size }, (_, i) => (
          path(policy.physical(state.subarray(i * policy.size, (i + 1) * policy.size)))
        ))
      ));
      return {
        ...this.frame(), plans: actions.map(path), executed: this.queue.length, film, calls,
        took_ms: Math.round(10 * (performance.now() - started)) / 10, command: this.command(), python: "",
      };
    }

    // The places where actions aim, from where the robot is.
    path(actions) {
      let [x, y] = this.observation;
      const { reach } = this.made.plane;
      return rounded([[x, y], ...actions.map(([dx, dy]) => [x += reach * dx, y += reach * dy])]);
    }

    command() {
      const { controls, made } = this, { first_seed: first, policy } = made, { starts, strengths } = made.facts;
      if (controls.noise !== 1 && (controls.noise !== 0 || this.isSteered)) {
        return `# burnish eval has no key for noise x ${controls.noise}`;
      }
      const words = ["burnish eval", `policy=${policy}`], lines = [];
      if (controls.noise === 0) words.push("start_noise=zero sampling_noise=zero");
      if (this.isSteered) {
        const { pace, reach } = made.plane, slider = strengths[controls.strategy];
        lines.push(`echo '${JSON.stringify({ positions: controls.sketch, pace, reach })}' > way.json`);
        words.push(`steer.strategy=${controls.strategy}`);
        if (slider && controls.strength !== null) words.push(`steer.${slider.key}=${controls.strength}`);
        words.push("steer.sketch=way.json");
      }
      return [...lines, [...words, `first_seed=${first} episodes=${starts}`].join(" ")].join("\n");
    }

    // Play the compared starts with these controls, and without steering.
    async compared(goesOn) {
      const controls = this.controls, isSteered = this.isSteered, found = {};
      if (controls.noise !== 1 && (controls.noise !== 0 || isSteered)) {
        throw new Error(`starts are compared with noise x 1, unsteered ones with x 0 too; got ${controls.noise}.`);
      }
      const sketch = isSteered ? new Sketch(controls.sketch, this.made.plane) : null;
      for (const name of isSteered ? ["steered", "plain"] : ["plain"]) {
        const episodes = await this.played(controls, name === "plain" ? null : sketch, goesOn);
        const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;
        const thin = (path) => path.filter((_, i) => i % Math.ceil(path.length / PATH_POINTS) === 0);
        found[name] = {
          value: mean(episodes.map(({ end }) => Number(end === "success"))),
          off_m: sketch && mean(episodes.map(({ path }) => mean(path.map((one) => sketch.distance(one))))),
          paths: episodes.map(({ path }) => rounded(thin(path))),
          won: episodes.map(({ end }) => end === "success"),
        };
      }
      return found;
    }

    async played(controls, sketch, goesOn) {
      const { policy, made } = this, { act_steps: held, action_start: ahead } = policy.loop;
      const task = this.tasks(made.facts.starts);
      const episodes = task.discs.map((_, i) => {
        const observation = task.reset(i, made.first_seed + i);
        return { i, observation, path: [observation.slice(0, 2)], end: "" };
      });
      try {
        for (let decision = 0; goesOn() && episodes.some(({ end }) => !end); decision++) {
          const running = episodes.filter(({ end }) => !end);
          const seen = running.map(({ observation }) => observation);
          const { plans } = await this.planned(controls, sketch, seen, [made.first_seed, decision, 1]);
          running.forEach((episode, row) => {
            for (const action of policy.physical(plans[row]).slice(ahead, ahead + held)) {
              if (episode.end) break;
              const { observation, end } = task.step(episode.i, action);
              episode.observation = observation;
              episode.path.push(observation.slice(0, 2));
              episode.end = end || (episode.path.length > made.task.max_episode_steps ? "time limit" : "");
            }
          });
          await pause(0); // the page may draw and listen
        }
      } finally {
        task.close();
      }
      return episodes;
    }
  }

  // What the page talks to in place of a WebSocket: messages of one kind that wait are replaced by the newest.
  class OwnSocket extends EventTarget {
    constructor(opening) {
      super();
      this.waiting = {};
      this.wake = () => {};
      opening.then((session) => this.converse(session)).catch((error) => {
        this.answer({ error: `The page cannot be loaded: ${error.message}` });
        throw error;
      });
    }

    send(text) {
      Object.assign(this.waiting, JSON.parse(text));
      this.wake();
    }

    answer(message) {
      this.dispatchEvent(new MessageEvent("message", { data: JSON.stringify(message) }));
    }

    // What waits; nothing if nothing arrives until then.
    async taken(until) {
      if (!Object.keys(this.waiting).length) {
        const arrived = new Promise((done) => { this.wake = done; });
        await (until === null ? arrived : Promise.race([arrived, pause(Math.max(until - performance.now(), 0))]));
      }
      const taken = this.waiting;
      this.waiting = {};
      return taken;
    }

    async converse(session) {
      const { facts } = session.made, period = 1000 / facts.hz;
      const actions = {
        seed: (seed) => session.reset(seed),
        controls: (values) => session.control(values),
        move: (place) => session.move(place),
      };
      let isPlaying = false, due = 0;
      this.answer({ facts, ...(await session.reset(0)) });
      for (;;) {
        const message = await this.taken(isPlaying ? due : null);
        const answer = "id" in message ? { id: message.id } : {};
        try {
          for (const [kind, act] of Object.entries(actions)) {
            if (kind in message) Object.assign(answer, await act(message[kind]));
          }
          if ("play" in message) [isPlaying, due] = [message.play === true, performance.now()];
          if ("step" in message || (isPlaying && performance.now() >= due)) {
            Object.assign(answer, await session.step());
            due = Math.max(due + period, performance.now() - period);
            if (answer.end) due = performance.now() + PAUSE_MS;
          }
        } catch (error) {
          answer.error = error.message;
          due = performance.now() + PAUSE_MS;
        }
        if (Object.keys(answer).length) this.answer(answer);
        if ("compare" in message) this.compare(session, message.compare);
      }
    }

    // Play the compared starts beside the episode; a newer comparison ends this one.
    async compare(session, round) {
      this.round = round;
      const answer = { compared: {}, round };
      try {
        answer.compared = await session.compared(() => this.round === round);
      } catch (error) {
        answer.error = error.message;
      }
      if (this.round === round) this.answer(answer);
    }
  }

  // -- in a page: packages and graphs come as scripts, which a browser also loads from files --------------

  function loaded(name) {
    return new Promise((done, failed) => {
      const script = document.createElement("script");
      Object.assign(script, { src: name, onload: done, onerror: () => failed(new Error(`${name} is missing`)) });
      document.head.append(script);
    });
  }

  async function unpacked(name) {
    const { body } = await fetch(`data:;base64,${globalThis.packed[name]}`);
    delete globalThis.packed[name];
    return new Response(body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  }

  async function imported(name) {
    const address = URL.createObjectURL(new Blob([await unpacked(name)], { type: "text/javascript" }));
    try {
      return await import(address);
    } finally {
      URL.revokeObjectURL(address);
    }
  }

  async function opened() {
    await Promise.all(["policy.js", "onnxruntime.js", "mujoco.js"].map(loaded));
    const [ort, { default: loadMujoco }] = await Promise.all(["ort.mjs", "mujoco.mjs"].map(imported));
    Object.assign(ort.env.wasm, { numThreads: 1, wasmBinary: await unpacked("ort.wasm") });
    const mujoco = await loadMujoco({ wasmBinary: await unpacked("mujoco.wasm"), locateFile: (name) => name });
    return Session.open({ ort, mujoco, files: unpacked });
  }

  if (globalThis.document) globalThis.ownSocket = () => new OwnSocket(opened());
  return { Session, Sketch, OwnSocket };
})();
