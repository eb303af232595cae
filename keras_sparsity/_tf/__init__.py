"""Names of TensorFlow and Keras, versions, settings, argument checks.

Only the modules here use private names of TensorFlow and Keras. Each function
names the private ones it uses, each module the versions they were checked on.
`tests/_tf` calls every function, so that a test names what a new version
breaks.
"""
