"""Does a trainer's step depend on how its work is split? The same comparison for users and for ourselves."""
