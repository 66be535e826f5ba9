"""Ways to take a step: tensors and graphs in, a fast loop out.

To be read in this order: ``engine`` (what a step, a loop and an engine are; the eager engine), ``choose`` (which engine
takes the steps), ``tracing`` with ``recorder`` and ``program`` (a step as a graph of tensor operations), ``replayed``
and ``inductor`` (that graph, replayed or compiled), ``generated/`` (that graph as loops over elements), ``c/`` and
``in_c``, ``cuda/`` and ``in_cuda`` (those loops, written down and run). ``agreement`` and ``constants`` say what a
graph does to memory and what it holds, ``kernel_folder`` whose code is run, ``torch_internals`` what is torch's own.
"""
