"""What moving KV costs: connectors beside a plain copy and the raw library, over the same copies.

``cases`` says which copies, ``ways`` how they are made, ``ends`` are the two processes of a way,
``run`` measures all ways in turns, ``report`` compares and draws.
"""
