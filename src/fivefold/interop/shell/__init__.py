"""A reader of shell scripts that runs nothing: words, variables and branches, as far as the text decides them."""
