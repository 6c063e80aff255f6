"""Domain types ⇄ messages, one module for each family. The only modules that know both.

A peer may be newer. What it has added to an enum or a oneof is taken for the nearest that is known
here, where there is something near (a reason, an action, a state in which no new work is sent), and
is a typed error where there is not (a role, a kind of KV), for whoever reads it to leave out.
"""
