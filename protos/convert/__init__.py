"""Domain types ⇄ messages, one module for each family. The only modules that know both."""
