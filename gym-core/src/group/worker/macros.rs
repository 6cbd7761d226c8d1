//! A macro that declares a worker and its methods once.

/// Declares a worker and its methods: the type of each method, its registration and its handler come from one signature.
#[macro_export]
macro_rules! worker {
    // The word before `fn` says which calls may run concurrently: `exclusive`, `shared` or `blocking`. In parentheses:
    // `idempotent` if running the method twice has the same effect as running it once.
    (
        $(#[$doc:meta])*
        impl Worker for $worker:ident as $name:ident {
            fn start($env:tt : $env_type:ty, $init:tt : $init_type:ty $(,)?) -> $started:ty $start:block
            $(
                $(#[$method_doc:meta])*
                $access:ident $(($mark:ident))? $(async)? fn $method:ident $parameters:tt -> $answer:ty $body:block
            )+
        }
    ) => {
        $(#[$doc])*
        #[allow(non_camel_case_types, missing_docs)]
        pub mod $name {
            $(
                $(#[$method_doc])*
                #[derive(Clone, Copy, Debug)]
                pub struct $method;
            )+
        }
        impl $crate::group::Worker for $worker {
            type Init = $init_type;
            fn start($env: $env_type, $init: $init_type) -> $started $start
            fn methods(methods: &mut $crate::group::Methods<Self>) {
                $( methods.$access($name::$method); )+
            }
        }
        $(
            impl $crate::group::Method for $name::$method {
                const NAME: &'static str = concat!(stringify!($name), ".", stringify!($method));
                const IDEMPOTENT: bool = $crate::worker!(@idempotent $($mark)?);
                type Args = <$crate::worker!(@call $parameters) as $crate::group::worker::Carried>::Value;
                type Reply = <$answer as $crate::group::worker::Carried>::Value;
            }
            $crate::worker!(@handles $access $worker, $name::$method, $parameters -> $answer, $body);
        )+
    };
    (@idempotent) => { false };
    (@idempotent idempotent) => { true };
    (@call (&mut $this:ident, $cx:tt : $cx_type:ty, $call:tt : $type:ty $(,)?)) => { $type };
    (@call (&$this:ident, $cx:tt : $cx_type:ty, $call:tt : $type:ty $(,)?)) => { $type };
    (@handles exclusive $worker:ident, $method:path, $parameters:tt -> $answer:ty, $body:block) => {
        impl $crate::group::Handles<$method> for $worker {
            async fn handle $parameters -> $answer $body
        }
    };
    (@handles shared $worker:ident, $method:path, $parameters:tt -> $answer:ty, $body:block) => {
        impl $crate::group::HandlesShared<$method> for $worker {
            async fn handle $parameters -> $answer $body
        }
    };
    (@handles blocking $worker:ident, $method:path, $parameters:tt -> $answer:ty, $body:block) => {
        impl $crate::group::HandlesBlocking<$method> for $worker {
            fn handle $parameters -> $answer $body
        }
    };
}
