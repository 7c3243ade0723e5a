// Browsers start no worker from a folder: where the pages are opened from one, the search runs in a hidden frame instead.
// The theme's plugin `offline` finds this file by its name, and the theme's worker looks for `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.document.open(); // or Firefox would load an empty page over this one
      inside.document.write("<!doctype html>");
      inside.document.close();
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      // Unlike that of a worker this one returns a promise, for which the theme's worker waits.
      inside.importScripts = async (...urls) => {
        for (const each of urls) await this.load(inside, each);
      };
      this.inside = inside;
      this.loaded = this.load(inside, url);
    }

    load(inside, url) {
      return new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = done;
        script.onerror = failed;
        inside.document.head.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
