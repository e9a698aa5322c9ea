"""Generating in batches with a cache of fixed size, and a look at whether the output repeats itself.

    pip install transformers
    python examples/recipes/generation.py --tokens 32

A static cache has room for `max_cache_len` tokens from the start: shapes never change, so that torch.compile and CUDA
graphs can be used, at the price of memory for what is not generated. Prompts of one batch are padded on the left, or
the model would go on after padding. Repetition: the share of distinct words, and TF-IDF similarity of the outputs with
each other; fewer than half distinct words, or outputs that are all alike, point to a collapsed model or to sampling
that is too greedy.
"""

import argparse
import itertools
import math
from collections import Counter

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def distinct_share(words: list[str]) -> float:
    """Distinct words, as a share of all (0..1); below 0.5 is high repetition."""
    return len(set(words)) / len(words) if words else 1.0


def similarity(texts: list[list[str]]) -> float:
    """Mean cosine (0..1) of the texts' TF-IDF vectors with each other; 1 for texts that use the same words alike."""
    in_texts = Counter(word for text in texts for word in set(text))
    rarity = {word: math.log((1 + len(texts)) / (1 + count)) + 1 for word, count in in_texts.items()}
    vectors = [{word: count * rarity[word] for word, count in Counter(text).items()} for text in texts]
    lengths = [math.sqrt(sum(value**2 for value in vector.values())) for vector in vectors]
    pairs = [
        sum(value * b.get(word, 0.0) for word, value in a.items()) / (length_a * length_b)
        for (a, length_a), (b, length_b) in itertools.combinations(zip(vectors, lengths, strict=True), 2)
        if length_a and length_b
    ]
    return sum(pairs) / len(pairs) if pairs else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=256, n_positions=256, n_embd=64, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = GPT2LMHeadModel(shape).eval()
    prompts = [torch.randint(3, 256, (length,)) for length in range(4, 4 + options.batch)]
    longest = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack(
        [torch.nn.functional.pad(torch.ones_like(prompt), (longest - len(prompt), 0)) for prompt in prompts]
    )
    settings = {"attention_mask": mask, "max_new_tokens": options.tokens, "do_sample": False}
    growing = model.generate(ids, **settings)
    static = model.generate(ids, **settings, cache_implementation="static")
    words = [[str(token) for token in row[longest:].tolist()] for row in static]
    print(f"{len(static)} outputs of {options.tokens} tokens; same with both caches: {torch.equal(growing, static)}")
    shares = [distinct_share(text) for text in words]
    print(
        f"distinct {sum(shares) / len(shares):.2f}, high repetition in {sum(share < 0.5 for share in shares)}; alike "
        f"{similarity(words):.2f}"
    )


if __name__ == "__main__":
    main()
