"""The Triton kernels. Each has the name and the signature of its torch reference in `kernels/`.

Nothing on the CPU's path imports them, nor triton. Without a CUDA device they run in Triton's
interpreter, for tests: that is decided by `TRITON_INTERPRET=1` when triton is first imported.

Every launch can be captured in a CUDA graph: grids follow from shapes, and what varies from step to
step (lengths, slots) is read on the device.

Arguments of kernels are annotated `tl.tensor` or `tl.constexpr`: the compiler, unlike the
interpreter, looks annotations up, and refuses names that are not Triton's. Numbers that change from
step to step are named in `do_not_specialize`, and small arrays that lie anywhere in a step's upload
in `do_not_specialize_on_alignment`: else a request waits until another form is compiled.
"""
