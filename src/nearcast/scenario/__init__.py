"""Deployments described as data: sites, hosts and links; processes and clients; what goes wrong and when.

The same description runs in the simulator and on the emulated WAN. What it is made of: :mod:`topology`, :mod:`workload`,
:mod:`events`, :mod:`movement`, and :mod:`scenario`, which holds them all. Where it comes from: :mod:`files`, checked by
:mod:`checks`; ready-made ones are in ``ready``. What becomes of it: a network (:mod:`assembly`), every process, broker and
client (:mod:`expansion`), all that happens (:mod:`timeline`), when clients publish (:mod:`schedule`) and what
(:mod:`identity`).
"""
