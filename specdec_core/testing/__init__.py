"""The conformance kit, for authors of drafters and verifiers.

    pytest --specdec-drafter NAME[:option=value,...]
    pytest --specdec-verifier NAME

run every contract against a plugin, without a test file of its own (`plugin`). The parts may be used in an
author's own tests too: tiny random models (`models`), plain decoding to compare with (`reference`), a drafter
that does as it is told (`scripted`), every outcome of a verifier (`enumeration`, `worlds`).

Nothing is imported here: pytest loads the plugin in every project where specdec is installed.
"""
