"""What the programs do. Their command lines stand outside and import nothing slow."""
