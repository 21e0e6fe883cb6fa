// Runs docs/draw/session.js on what the test asks for (JSON on stdin), and prints what comes out (JSON).
//   node draw_session.cjs <folder of npm packages>
const { readFileSync } = require("node:fs");
const { join } = require("node:path");

const root = join(__dirname, "..", ".."), packages = process.argv[2];
const read = (...parts) => readFileSync(join(...parts));
const files = async (name) => read(root, name === "avoid.xml" ? "assets" : "docs/draw/graphs", name);
require(join(root, "docs/draw/session.js"));

async function main() {
  const { plans, actions } = JSON.parse(readFileSync(0, "utf8"));
  const ort = await import(join(packages, "onnxruntime-web/dist/ort.wasm.bundle.min.mjs"));
  const wasmBinary = read(packages, "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm");
  Object.assign(ort.env.wasm, { numThreads: 1, wasmBinary });
  const { default: load } = await import(join(packages, "@mujoco/mujoco/mujoco.js"));
  const mujoco = await load({ wasmBinary: read(packages, "@mujoco/mujoco/mujoco.wasm") });
  const session = await globalThis.draw.Session.open({ ort, mujoco, files });
  const found = [];
  for (const { observations, noise, strategy, strength, line } of plans) {
    const sketch = strategy === "off" ? null : new globalThis.draw.Sketch(line, session.made.plane);
    const planned = await session.policy.plan({
      observations: Float32Array.from(observations.flat()), count: observations.length, noise,
      guides: sketch && observations.map((one) => sketch.guide(one, session.policy)),
      recipe: session.policy.recipe(session.settings({ strategy, strength }, sketch)),
    });
    found.push(planned.plans.map((plan) => [...plan]));
  }
  const paths = actions.map(({ seed, rows }) => {
    const path = [session.task.reset(0, seed)];
    let end = "";
    for (const row of rows) {
      if (end) break;
      const step = session.task.step(0, row);
      path.push(step.observation);
      end = step.end;
    }
    return { path, end };
  });
  process.stdout.write(JSON.stringify({ plans: found, paths, version: mujoco.mj_versionString() }));
}
main();
