// Search in a site that is read from files, where browsers refuse workers: the script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const url = new URL(address, location);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const run = (source) => new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(source, url);
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${script.src} cannot be read`));
        this.inside.document.body.append(script);
      });
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => run(source)), Promise.resolve());
      this.ready = run(url);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
