"""The life of a network that people keep: it is made, taught from folders, asked, handed on."""
