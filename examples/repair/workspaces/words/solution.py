"""Words of texts."""


def longest_word(text):
    """Return the longest word of a text; of several, the first."""
    longest = ""
    for word in text.split():
        if len(word) >= len(longest):
            longest = word
    return longest
