"""Made traffic of one application: JSON extraction from short product descriptions.

Every description is put together from templates and attributes by a seeded
generator; no two prompts of a file are alike. `python -m
paceline_lab.bench.narrow_traffic --out prompts.jsonl --rows 2000` writes what `paceline
train draft --data prompts.jsonl` lets the target answer and learns from.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = "Answer with one JSON object and nothing else."
EXAMPLE_QUESTION = "The Havlund bench is made of oak and comes in brown. It costs $120.00 and is in stock."
EXAMPLE_ANSWER = (
    '{"product": "bench", "brand": "Havlund", "color": "brown", "material": "oak", "price": 120.00, "in_stock": true}'
)

PRODUCTS = (
    ("desk lamp", "table lamp", "wall clock", "picture frame", "mirror", "vase", "candle holder", "plant pot"),
    ("backpack", "wallet", "belt", "handbag", "travel bag", "laptop sleeve", "phone case", "key ring"),
    ("frying pan", "kettle", "tea pot", "coffee mug", "salad bowl", "bread box", "knife block", "water bottle"),
    ("office chair", "bar stool", "bookshelf", "coffee table", "bed frame", "shoe rack", "coat hanger", "desk"),
    ("scarf", "jacket", "rain coat", "pair of gloves", "wool hat", "apron", "bath robe", "pair of slippers"),
)
MATERIALS = (
    ("brass", "glass", "steel", "ceramic", "aluminium", "bamboo"),
    ("leather", "canvas", "nylon", "cork", "felt", "suede"),
    ("cast iron", "steel", "copper", "porcelain", "clay", "enamel"),
    ("oak", "pine", "walnut", "birch", "steel", "rattan"),
    ("cotton", "wool", "linen", "silk", "fleece", "denim"),
)
COLORS = (
    *("black", "white", "red", "dark blue", "light blue", "green", "olive", "yellow", "orange", "grey", "silver"),
    *("gold", "brown", "beige", "pink", "purple", "turquoise", "cream"),
)
BRAND_STARTS = (
    *("Nor", "Bel", "Kas", "Tri", "Alm", "Ost", "Ver", "Mon"),
    *("Sil", "Dra", "Fen", "Gar", "Lun", "Pel", "Zan"),
)
BRAND_ENDS = ("vik", "mont", "ora", "sen", "dale", "eta", "holm", "ica", "ford", "una", "wick", "ano", "stad", "ello")
TEMPLATES = (
    "The {brand} {product} is made of {material} and comes in {color}. It costs {price} and is {stock}.",
    "{brand} presents a new {product} in {color}. Material: {material}. Price: {price}. It is {stock}.",
    "For {price} you get this {color} {product} by {brand}, made of {material}. It is {stock}.",
    "This {product} from {brand} is our favourite of the season: {color}, made of {material}, {price}. "
    "It is {stock}.",
    "{color_start} {product} made of {material}. Designed by {brand}. {stock_start}. {price}.",
    "Looking for a {product}? {brand} makes one of {material}, in {color}, at {price}. It is {stock}.",
    "New: {product}, {color}, {material}. Brand: {brand}. Now {price} instead of {old_price}. It is {stock}.",
    "At {price}, the {color} {product} by {brand} is a good gift. It is made of {material} and {stock}.",
    "{brand} {product}, {material}, {color}. {price} with free shipping. {stock_start}.",
    "Our customers love the {product} that {brand} makes of {material}. The {color} one is {stock} for {price}.",
    "{stock_start}: the {material} {product} from {brand}. Color {color}, price {price}.",
    "A {product} for every day. {brand} uses {material}, and the {color} finish lasts for years. {price}, {stock}.",
)
DETAILS = (
    "",
    " Wipe it clean with a damp cloth.",
    " Delivery takes {days} days.",
    " You may return it within {days} days.",
    " It weighs {weight} grams.",
    " Customers gave it {stars} of 5 stars.",
    " The warranty runs for {years} years.",
)


@dataclass(frozen=True)
class Product:
    """The attributes of one description, as its text writes them."""

    product: str
    brand: str
    color: str
    material: str
    price: str
    in_stock: bool


def draw_product(generator: random.Random) -> Product:
    """A product whose material suits its kind."""
    kind = generator.randrange(len(PRODUCTS))
    return Product(
        product=generator.choice(PRODUCTS[kind]),
        brand=generator.choice(BRAND_STARTS) + generator.choice(BRAND_ENDS),
        color=generator.choice(COLORS),
        material=generator.choice(MATERIALS[kind]),
        price=f"${generator.randrange(4, 400)}.{generator.choice(('00', '50', '90', '95', '99'))}",
        in_stock=generator.random() < 0.7,
    )


def describe(product: Product, generator: random.Random) -> str:
    """One description of a product."""
    stock = "in stock" if product.in_stock else generator.choice(("sold out", "out of stock"))
    text = generator.choice(TEMPLATES) + generator.choice(DETAILS)
    return text.format(
        product=product.product,
        brand=product.brand,
        color=product.color,
        color_start=product.color.capitalize(),
        material=product.material,
        price=product.price,
        old_price=f"${generator.randrange(400, 600)}.00",
        stock=stock,
        stock_start=stock.capitalize(),
        days=generator.randrange(2, 31),
        weight=10 * generator.randrange(8, 400),
        stars=f"{generator.randrange(30, 51) / 10:g}",
        years=generator.randrange(2, 11),
    )


def prompts(seed: int, rows: int) -> Iterator[list[dict[str, str]]]:
    """Chats that end with the user's turn, `rows` different ones."""
    generator = random.Random(seed)  # noqa: S311 - made-up text, not a secret
    seen: set[str] = set()
    while len(seen) < rows:
        text = describe(draw_product(generator), generator)
        if text not in seen:
            seen.add(text)
            yield chat(text)


def chat(description: str) -> list[dict[str, str]]:
    """The application's prompt: its instruction, an example, and the description to read."""
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": EXAMPLE_QUESTION},
        {"role": "assistant", "content": EXAMPLE_ANSWER},
        {"role": "user", "content": description},
    ]


def write_prompts(file: Path, seed: int, rows: int) -> None:
    """Write JSON lines with `messages`, as `paceline train draft --data` reads them."""
    lines = (json.dumps({"messages": messages}) + "\n" for messages in prompts(seed, rows))
    file.write_text("".join(lines))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `python -m paceline_lab.bench.narrow_traffic`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=2000, help="prompts to write")
    chosen = parser.parse_args(argv)
    write_prompts(chosen.out, chosen.seed, chosen.rows)


if __name__ == "__main__":
    main()
