"""The code of the programs; the modules of their command lines import nothing slow."""
