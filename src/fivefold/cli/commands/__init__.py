"""The commands. Each module holds one command function, whose signature is the command's flags."""
