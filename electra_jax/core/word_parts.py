"""Parts of words, as values of `masking.Masking.word_parts`.

The token after one that stands alone starts a word.
"""

STARTS, CONTINUES, ALONE = range(3)
