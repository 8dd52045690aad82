// Browsers start no worker from a page that was opened as a file. Search needs one: this runs its
// script in a frame of its own instead. Pages that come from a server keep the browser's workers.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.target = frame.contentWindow
      this.target.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.target.document.createElement("script")
      this.loaded = new Promise((done) => script.addEventListener("load", done))
      script.src = new URL(url, location.href).href
      this.target.document.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.target.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.target.frameElement.remove()
    }
  }
}
