"""The parts that the scripts share: one flat package of nouns, imported downwards only."""
