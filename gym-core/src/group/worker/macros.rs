//! The macro that declares a worker together with its methods.

/// Declares a worker and its methods. Each method is named once: its type, registration and handler come from one signature.
///
/// ```
/// use gym_core::group::{HostOptions, Method, Payload, WorkerEnv, WorkerHost};
/// use gym_core::{CallContext, Result, worker};
///
/// struct Counter(u64);
/// worker! {
///     impl Worker for Counter as counter {
///         fn start(_: WorkerEnv, from: u64) -> Result<Self> { Ok(Self(from)) }
///         /// Adds to the count and returns it.
///         exclusive async fn add(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
///             self.0 += call.value;
///             Ok(self.0.into())
///         }
///         /// Returns the count.
///         shared(idempotent) async fn get(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<u64>> { Ok(self.0.into()) }
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
/// // Controllers call `counter::add` and `counter::get` of a group of such hosts, which the crate gym-group starts.
/// let host = WorkerHost::start::<Counter>(WorkerEnv::new("counters", 0, 1), 10, &HostOptions::default()).await?;
/// assert_eq!(<counter::add as Method>::NAME, "counter.add");
/// # host.stop(std::time::Duration::ZERO).await
/// # }
/// ```
///
/// The macro declares the module `counter` with a unit struct for each method, and implements [`Method`], [`Worker`] and the
/// handler trait of each method. The name of a method on the wire is `MODULE.METHOD`. The module is visible where the worker is
/// declared; write `as pub counter` or `as pub(crate) counter` for callers elsewhere.
///
/// | before `fn` | handler trait | calls |
/// |---|---|---|
/// | `exclusive async` | [`Handles`] | one at a time, in order of arrival |
/// | `shared async` | [`HandlesShared`] | concurrent with other shared calls |
/// | `blocking` | [`HandlesBlocking`] | one at a time, on the rank's own thread |
///
/// Write `(idempotent)` after the first word if running the method twice has the same effect as running it once. For a worker with
/// type parameters, or methods that several workers share, implement the traits by hand.
///
/// # Compile errors
/// The error for a wrong declaration names the method and the expected form:
///
/// ```compile_fail
/// # use gym_core::{CallContext, Result, group::{Payload, WorkerEnv}, worker};
/// struct Counter;
/// worker! {
///     impl Worker for Counter as counter {
///         fn start(_: WorkerEnv, _: ()) -> Result<Self> { Ok(Self) }
///         // method `get`: expected `exclusive`, `shared` or `blocking` before `fn`, found `concurrent`
///         concurrent async fn get(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<u64>> { Ok(0.into()) }
///     }
/// }
/// ```
///
/// [`Method`]: crate::group::Method
/// [`Worker`]: crate::group::Worker
/// [`Handles`]: crate::group::Handles
/// [`HandlesShared`]: crate::group::HandlesShared
/// [`HandlesBlocking`]: crate::group::HandlesBlocking
#[macro_export]
macro_rules! worker {
    ($(#[$doc:meta])* impl Worker for $worker:ty as pub(crate) $name:ident { $($body:tt)* }) => {
        $crate::worker!(@declare [pub(crate) mod] [pub(crate)] $(#[$doc])* $worker, $name { $($body)* });
    };
    ($(#[$doc:meta])* impl Worker for $worker:ty as pub $name:ident { $($body:tt)* }) => {
        $crate::worker!(@declare [pub mod] [pub] $(#[$doc])* $worker, $name { $($body)* });
    };
    ($(#[$doc:meta])* impl Worker for $worker:ty as $name:ident { $($body:tt)* }) => {
        $crate::worker!(@declare [mod] [pub(super)] $(#[$doc])* $worker, $name { $($body)* });
    };
    ($(#[$doc:meta])* impl Worker for $worker:ty { $($body:tt)* }) => {
        compile_error!(concat!("worker `", stringify!($worker), "`: expected `impl Worker for ", stringify!($worker),
            " as NAME`; methods are called as `NAME::METHOD`"));
    };
    (@declare [$module:vis mod] [$visible:vis] $(#[$doc:meta])* $worker:ty, $name:ident {
        fn start $start_parameters:tt -> $started:ty $start:block
    }) => {
        compile_error!(concat!("worker `", stringify!($worker), "`: expected a method after `start`, such as ",
            "`exclusive async fn METHOD(&mut self, cx: &CallContext, call: Payload<ARGS>) -> Result<Payload<REPLY>> { … }`"));
    };
    // `@ $never` matches nothing. It makes the optional `async` a repetition, which the expansion can repeat.
    (@declare [$module:vis mod] [$visible:vis] $(#[$doc:meta])* $worker:ty, $name:ident {
        fn start $start_parameters:tt -> $started:ty $start:block
        $(
            $(#[$method_doc:meta])*
            $access:ident $(($mark:ident))? $(async $(@ $never:tt)*)? fn $method:ident $parameters:tt -> $answer:ty $body:block
        )+
    }) => {
        $(#[$doc])*
        #[allow(non_camel_case_types, missing_docs)]
        $module mod $name {
            $(
                $(#[$method_doc])*
                #[derive(Clone, Copy, Debug)]
                $visible struct $method;
            )+
        }
        impl $crate::group::Worker for $worker {
            type Init = $crate::worker!(@init $start_parameters);
            fn start $start_parameters -> $started $start
            fn methods(methods: &mut $crate::group::Methods<Self>) {
                $( $crate::worker!(@register $access methods, $name::$method); )+
            }
        }
        $(
            impl $crate::group::Method for $name::$method {
                const NAME: &'static str = concat!(stringify!($name), ".", stringify!($method));
                const IDEMPOTENT: bool = $crate::worker!(@idempotent $method $($mark)?);
                type Args = <$crate::worker!(@call $method $parameters) as $crate::group::worker::Carried>::Value;
                type Reply = <$answer as $crate::group::worker::Carried>::Value;
            }
            $crate::worker!(@handles $access [$(async $(@ $never)*)?] $worker, $name, $method, $parameters -> $answer, $body);
        )+
    };

    (@init ($env:tt : $env_type:ty, $init:tt : $init_type:ty $(,)?)) => { $init_type };
    (@init $other:tt) => { compile_error!("expected `fn start(env: WorkerEnv, init: INIT) -> Result<Self>`") };

    (@idempotent $method:ident) => { false };
    (@idempotent $method:ident idempotent) => { true };
    (@idempotent $method:ident $mark:ident) => {
        compile_error!(concat!("method `", stringify!($method), "`: expected `(idempotent)` or nothing, found `(",
            stringify!($mark), ")`"))
    };

    (@call $method:ident (&mut $this:ident, $cx:tt : $cx_type:ty, $call:tt : $type:ty $(,)?)) => { $type };
    (@call $method:ident (&$this:ident, $cx:tt : $cx_type:ty, $call:tt : $type:ty $(,)?)) => { $type };
    (@call $method:ident $other:tt) => {
        compile_error!(concat!("method `", stringify!($method), "`: expected the parameters ",
            "`(&mut self, cx: &CallContext, call: Payload<ARGS>)`, or the same with `&self` if it is shared"))
    };

    (@register exclusive $methods:ident, $method:path) => { $methods.exclusive($method) };
    (@register shared $methods:ident, $method:path) => { $methods.shared($method) };
    (@register blocking $methods:ident, $method:path) => { $methods.blocking($method) };
    // `@handles` reports the error.
    (@register $other:ident $methods:ident, $method:path) => { $methods };

    (@handles exclusive [async] $worker:ty, $name:ident, $method:ident, $parameters:tt -> $answer:ty, $body:block) => {
        impl $crate::group::Handles<$name::$method> for $worker {
            async fn handle $parameters -> $answer $body
        }
    };
    (@handles shared [async] $worker:ty, $name:ident, $method:ident, $parameters:tt -> $answer:ty, $body:block) => {
        impl $crate::group::HandlesShared<$name::$method> for $worker {
            async fn handle $parameters -> $answer $body
        }
    };
    (@handles blocking [] $worker:ty, $name:ident, $method:ident, $parameters:tt -> $answer:ty, $body:block) => {
        impl $crate::group::HandlesBlocking<$name::$method> for $worker {
            fn handle $parameters -> $answer $body
        }
    };
    (@handles blocking [async] $worker:ty, $name:ident, $method:ident, $($signature:tt)*) => {
        compile_error!(concat!("method `", stringify!($method), "`: a blocking method is not async; remove `async`, ",
            "or write `exclusive async fn`"));
    };
    (@handles exclusive [] $worker:ty, $name:ident, $method:ident, $($signature:tt)*) => {
        compile_error!(concat!("method `", stringify!($method), "`: an exclusive method is async; write ",
            "`exclusive async fn`, or `blocking fn`"));
    };
    (@handles shared [] $worker:ty, $name:ident, $method:ident, $($signature:tt)*) => {
        compile_error!(concat!("method `", stringify!($method), "`: a shared method is async; write `shared async fn`"));
    };
    (@handles $access:ident $async:tt $worker:ty, $name:ident, $method:ident, $($signature:tt)*) => {
        compile_error!(concat!("method `", stringify!($method), "`: expected `exclusive`, `shared` or `blocking` before `fn`, ",
            "found `", stringify!($access), "`"));
    };
}
