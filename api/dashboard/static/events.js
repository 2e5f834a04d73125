// The service's events, by one connection for all tabs of a browser: it has six of them for a host.
//
// Among the tabs that are seen one listens, and passes on what it hears. It says so every second. A tab that is closed
// or hidden takes its leave; one that crashed or sleeps falls silent. Then another goes on from the last id.
const BEAT_MS = 1000;
const SILENCE_MS = 3500;
const ANSWER_MS = 300; // within which a tab that listens answers one that asks
const GATHER_MS = 100;
const PAUSE_MS = 1000;

const CHANNEL = "rubberband-events";

// Says to all tabs that experiments have changed in a way that is no event: their labels, or that they are gone.
export function announce(experiments) {
  const channel = new BroadcastChannel(CHANNEL);
  channel.postMessage({ changed: experiments });
  channel.close();
}

// Calls `changed()` soon after events of the experiment (or of any) came, at most once in PAUSE_MS, and never while the
// page is hidden. This tab listens only while `wanted()`. Who was signed out meanwhile is asked to sign in.
export function follow({ after, experiment = "", wanted = () => true, changed }) {
  const channel = new BroadcastChannel(CHANNEL);
  const me = Math.random();
  const tell = throttled(changed);
  let upto = Number(after);
  let heardAt = 0;
  let stream = null;

  // `news`: the experiments that events with from < id <= upto belong to. What was missed before counts as a change.
  function take(news) {
    if (news.upto <= upto) return;
    if (news.from > upto || !experiment || news.experiments.includes(experiment)) tell();
    upto = news.upto;
  }

  function pass(news) {
    channel.postMessage({ by: me, ...news });
    take(news);
  }

  const isUsed = () => !document.hidden && wanted();
  const beat = () => channel.postMessage({ by: me, from: upto, upto, experiments: [] });

  function look() {
    if (stream && !isUsed()) retire();
    else if (stream) beat();
    else if (isUsed() && performance.now() - heardAt > SILENCE_MS) {
      stream = opened(upto, pass);
      beat();
    }
  }

  function stop() {
    stream?.close();
    stream = null;
  }

  function retire() {
    if (stream) channel.postMessage({ left: true });
    stop();
  }

  // Another may listen already: it is asked first.
  function ask() {
    heardAt = performance.now() - SILENCE_MS + ANSWER_MS;
    channel.postMessage({ asked: true });
    setTimeout(look, ANSWER_MS * (1 + Math.random()));
  }

  channel.addEventListener("message", ({ data }) => {
    if (data.asked) {
      if (stream) look();
    } else if (data.changed) {
      if (!experiment || data.changed.includes(experiment)) tell();
    } else if (data.left) ask();
    else {
      heardAt = performance.now();
      if (stream && data.by < me) stop(); // of two that listen one is enough
      take(data);
    }
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? retire() : ask()));
  window.addEventListener("pagehide", retire);
  window.addEventListener("pageshow", (event) => { if (event.persisted) ask(); });
  setInterval(look, BEAT_MS);
  ask();
}

// A stream from an id on; `pass` gets its news. It is opened again when it is cut or refused, until it is closed.
function opened(after, pass) {
  let upto = after;
  let news = null;
  let source = null;
  let refusals = 0;
  let isClosed = false;

  function heard({ lastEventId, data }) {
    if (!news) {
      news = { from: upto, experiments: new Set() };
      setTimeout(hand, GATHER_MS);
    }
    upto = Number(lastEventId);
    news.experiments.add(JSON.parse(data).experiment);
  }

  function hand() {
    const { from, experiments } = news;
    news = null;
    if (!isClosed) pass({ from, upto, experiments: [...experiments] });
  }

  // What is cut off a browser opens again by itself; not so what is refused.
  async function lost() {
    if (source.readyState !== EventSource.CLOSED) return;
    refusals += 1;
    const status = await fetch(address(), { method: "HEAD" }).then((answer) => answer.status, () => 0);
    if (isClosed) return;
    if (status === 401 || status === 410) window.location.reload(); // signed out, or away for too long
    else setTimeout(open, Math.min(30000, 1000 * 2 ** refusals) * (0.75 + Math.random() / 2));
  }

  const address = () => `/v1/events?after=${upto}`;

  function open() {
    if (isClosed) return;
    source = new EventSource(address());
    source.addEventListener("open", () => { refusals = 0; });
    source.addEventListener("error", lost);
    for (const kind of document.body.dataset.kinds.split(" ")) source.addEventListener(kind, heard);
  }

  open();
  return { close: () => { isClosed = true; source.close(); } };
}

// Calls `changed` soon, and not before it is done and a pause has passed.
function throttled(changed) {
  let isBusy = false;
  let isDue = false;
  return async function tell() {
    isDue = !document.hidden; // a page that is shown again looks by itself
    if (isBusy || !isDue) return;
    isBusy = true;
    isDue = false;
    try {
      await changed();
    } finally {
      setTimeout(() => {
        isBusy = false;
        if (isDue) tell();
      }, PAUSE_MS);
    }
  };
}
