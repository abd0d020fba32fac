r"""Stores what the reference of preference training says of each pair, so that no second model is needed.

    python recipes/precompute_reference.py RECIPE.yaml OUTPUT [key=value ...]

The reference is the model that a run of RECIPE starts from. OUTPUT/<source>.jsonl holds the rows of each
source with two more fields, sums of log-probabilities in nats over the tokens of an answer:

    reference_chosen_logp, reference_rejected_logp

Train on them with `objective.reference: data`, with the same model, tokenizer and chat template:

    python recipes/precompute_reference.py recipes/preference.yaml runs/preference-stored
    isoloss train recipes/preference.yaml objective.reference=data \
        data.sources.0.path=runs/preference-stored/docstrings.jsonl
"""

import argparse
import sys
from pathlib import Path

from isoloss.data.errors import DataError
from isoloss.train.recipe import RecipeError, load_recipe
from isoloss.train.reference import store_reference


def main() -> None:
    """Write the rows with their references, or say what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("output", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    try:
        written = store_reference(load_recipe(options.recipe, options.overrides), options.output)
    except (RecipeError, DataError, ValueError) as error:
        sys.exit(f"precompute_reference: {error}")
    for name, path in written.items():
        print(f"precompute_reference: {name}: {path}")


if __name__ == "__main__":
    main()
