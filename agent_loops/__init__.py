"""Ready agent loops, tools and rewards: use them by dotted path, or copy one to write your own."""
