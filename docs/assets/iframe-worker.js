// Browsers start no worker for a page from the disk. There the search's worker runs in a hidden frame, which has the
// same names: messages come in as events, and postMessage sends.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame;
      const inside = frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      this.ready = new Promise((loaded) => {
        const script = inside.document.createElement("script");
        script.onload = loaded;
        script.src = url;
        inside.document.body.append(script);
      });
    }

    postMessage(data) {
      const { contentWindow } = this.frame;
      this.ready.then(() => contentWindow.dispatchEvent(new contentWindow.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
