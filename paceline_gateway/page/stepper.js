// One way to look at one of many: by pointer, by touch, and by keyboard from a single tab stop.

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 };

/**
 * Shows the item that is pointed at or stepped to.
 * @param container takes the focus; its items carry data-index
 * @param items how many there are, and the element of one
 * @param show called with an index
 */
export function stepper(container, items, show) {
  let current = -1;

  function choose(index) {
    if (index === current || !items.count()) return;
    if (current >= 0) items.at(current)?.classList.remove("current");
    current = Math.max(0, Math.min(items.count() - 1, index));
    items.at(current).classList.add("current");
    show(current);
  }

  const pointed = (event) => {
    const found = event.target.closest?.("[data-index]");
    if (found) choose(Number(found.dataset.index));
  };
  container.addEventListener("pointerover", pointed);
  container.addEventListener("click", pointed);
  container.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const ends = { Home: 0, End: items.count() - 1 };
    const next = ends[event.key] ?? (event.key in STEPS ? current + STEPS[event.key] : null);
    if (next === null) return;
    event.preventDefault();
    choose(Math.max(0, next));
    items.at(current)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}
