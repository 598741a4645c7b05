// What a screen reader hears while text streams in: now and then how far it is, not each token.

const PAUSE_MS = 5000;

/** Says a text through the page's live region; `now` passes over the pause between two of them. */
export function announcer(region) {
  let said = -Infinity;
  return (text, { now = false } = {}) => {
    if (!now && performance.now() - said < PAUSE_MS) return;
    said = performance.now();
    region.textContent = text;
  };
}
