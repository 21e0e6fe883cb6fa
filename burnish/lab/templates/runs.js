"use strict";
(() => {
  const token = new URLSearchParams(location.search).get("token");
  const list = document.getElementById("run-list");
  const shown = document.getElementById("run");
  const EVERY_MS = 2000;
  let chosen = null, version = "", isAsking = false;

  async function ask(path, values = {}) {
    const query = new URLSearchParams({ token, ...values });
    const answer = await fetch(`${path}?${query}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    return answer.json();
  }

  // where runs may be stopped and continued; both take a moment, after which the page says so by itself
  let isStopping = false;
  function showControl(found) {
    const [stop, proceed] = ["stop", "continue"].map((id) => document.getElementById(id));
    document.getElementById("run-control").hidden = found.is_running === undefined;
    isStopping &&= found.is_running;
    stop.disabled = !found.is_running || isStopping;
    proceed.disabled = found.is_running;
    const state = isStopping ? "ends after its iteration, with a checkpoint …" : found.is_running ? "running" : "";
    document.getElementById("run-state").textContent = found.problem || state;
  }

  for (const id of ["stop", "continue"]) {
    document.getElementById(id).addEventListener("click", async () => {
      const answer = await fetch(`run?${new URLSearchParams({ token, name: chosen, do: id })}`, { method: "POST" });
      isStopping = id === "stop" && answer.ok;
      await update();
      if (!answer.ok) document.getElementById("run-state").textContent = await answer.text();
    });
  }

  function age(seconds) {
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
    }
    return `${seconds} s ago`;
  }

  function choose(name) {
    chosen = name;
    version = "";
    isStopping = false;
    update();
  }

  // at first, and where the chosen run has gone
  function first(runs) {
    chosen = runs[0]?.name ?? null;
    version = "";
    isStopping = false;
    if (chosen !== null) return;
    shown.replaceChildren();
    document.getElementById("run-control").hidden = true;
  }

  function fill(runs) {
    document.getElementById("no-runs").hidden = runs.length > 0;
    if (!runs.some((run) => run.name === chosen)) first(runs);
    list.replaceChildren(...runs.map((run) => {
      const row = document.createElement("tr");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = run.name;
      button.addEventListener("click", () => choose(run.name));
      row.insertCell().append(button);
      for (const text of [run.algo, run.task, run.step ?? "–", age(run.age_s)]) row.insertCell().textContent = text;
      row.className = run.name === chosen ? "chosen" : "";
      return row;
    }));
  }

  async function update() {
    if (isAsking || document.hidden) return;
    isAsking = true;
    const lost = document.getElementById("runs-lost");
    try {
      fill(await ask("runs"));
      if (chosen !== null) {
        const name = chosen;
        const found = await ask("run", { name, version });
        if (found.html !== undefined && name === chosen) shown.innerHTML = found.html;
        if (name === chosen) {
          version = found.version;
          showControl(found);
        }
      }
      lost.hidden = true;
    } catch {
      lost.hidden = false;
    }
    isAsking = false;
  }

  setInterval(update, EVERY_MS);
  document.addEventListener("visibilitychange", update);
  update();
})();
